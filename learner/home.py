"""What a learner's home tells whoever was only given its name; read before anything that takes seconds to load."""

from __future__ import annotations

from pathlib import Path

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import read_text

from .config import CHECKPOINTS_FOLDER, IDENTITY_FILE, MODEL_DIR_FILE

HOME_INSIDE = "home"
"""What `echo2 submit` calls the home, in the folder that it makes for the learner."""

MOVED = "name the folder it began with by --model-dir"


def base_model(home: Path, model_dir: Path | None = None) -> Path:
    """The model folder that the run in `home` began with: `model_dir`, or where the learner last found it.

    Raises ConfigurationError when `home` is no learner's, or the model's folder is not known or not there.
    """
    try:
        _check(home)
        model_dir = model_dir or _known_model_dir(home)
        if not model_dir.is_dir():
            raise ConfigurationError(f"there is no folder {model_dir}, where this run's base model was; {MOVED}")
    except OSError as error:
        raise ConfigurationError(f"cannot look into {error.filename or home}: {error.strerror}") from error
    return model_dir


def _check(home: Path) -> None:
    if not home.is_dir():
        raise ConfigurationError(f"there is no folder {home}")
    if _is_home(home):
        return
    if (home / MODEL_DIR_FILE).exists():
        raise ConfigurationError(f"the learner in {home} has no checkpoint yet; try again when it has trained a step")
    inside = home / HOME_INSIDE
    what = (
        "has no checkpoint yet, or is no learner's home"
        if _has_key(home)
        else "is no learner's home (it has no checkpoints)"
    )
    raise ConfigurationError(
        f"{home} {what}; HOME is what learner.toml calls `home`"
        + (f": here {inside}" if _is_home(inside) or _has_key(inside) else "")
    )


def _is_home(folder: Path) -> bool:
    return (folder / CHECKPOINTS_FOLDER).is_dir()


def _has_key(folder: Path) -> bool:
    """So has a home before its first step; so has a coordinator's folder."""
    return (folder / IDENTITY_FILE).exists()


def _known_model_dir(home: Path) -> Path:
    path = home / MODEL_DIR_FILE
    if not path.exists():
        raise ConfigurationError(f"{home} does not say which model it began with; {MOVED}")
    name = read_text(path, "name of a model folder").strip()
    if not name or "\0" in name:
        raise ConfigurationError(f"{path} does not hold the name of a folder; {MOVED}")
    return Path(name)
