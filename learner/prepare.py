"""Makes the model folders a run starts from: `echo2-learner prepare` (no network, nothing downloaded)."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from echo2.p2p.errors import ConfigurationError
from echo2.p2p.settings import refuse_used
from echo2.tasks.model_card import load_model_card

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from echo2.tasks.model_card import ModelCard

ModelName = Literal["tiny", "smollm2"]
MODEL_NAMES: tuple[ModelName, ...] = ("tiny", "smollm2")

USED = "name another or remove it"
"""What to do about a folder that is there already."""


def prepare(model: ModelName, out: Path) -> ModelCard:
    """Makes the model folder `out`, or nothing at all: a folder cut off half-way never appears under that name.

    Raises ConfigurationError when `out` is there already and not empty, when the weights are not installed, or when
    the disk refuses.
    """
    if model not in MODEL_NAMES:
        raise ConfigurationError(f"there is no model {model!r} to prepare; choose one of {', '.join(MODEL_NAMES)}")
    with new_folder(out) as folder:
        # Imported here: a wrong name or folder is refused at once, not after the seconds torch takes.
        tell_loading()
        if model == "tiny":
            from .tiny import prepare_tiny

            prepare_tiny(folder)
        else:
            from .smollm2 import prepare_smollm2

            prepare_smollm2(folder)
        return load_model_card(folder)


def prepare_from(source: Path, out: Path, name: str | None = None) -> ModelCard:
    """As `prepare`, from a Hugging Face folder: `hugging_face.prepare_folder` says what is refused."""
    if not source.is_dir():
        raise ConfigurationError(f"{source} is not a folder; name one with a Hugging Face model in it")
    with new_folder(out) as folder:
        tell_loading()
        from .hugging_face import prepare_folder

        return prepare_folder(source, folder, name)


def tell_loading() -> None:
    """To whoever sits there: the silence that follows is no fault. In a file or a pipe stderr is for what is wrong."""
    if sys.stderr.isatty():
        print("loading torch and transformers, which takes some seconds ...", file=sys.stderr, flush=True)


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which then becomes `out`; when the filling fails or SIGTERM ends it, nothing is left of it.

    Raises ConfigurationError when `out` is there already and not empty, or when the disk refuses.
    """
    out = out.absolute()
    refuse_used(out, USED)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Not the whole of the name: with what is added to it, it might be longer than a name may be.
        prefix = f".{out.name[:32]}."
        with _terminated_by_exception(), tempfile.TemporaryDirectory(prefix=prefix, dir=out.parent) as scratch:
            folder = Path(scratch) / "model"
            folder.mkdir()
            yield folder
            if out.exists():
                out.rmdir()
            folder.rename(out)
    except OSError as error:
        raise ConfigurationError(
            f"the model folder {_short(out)} cannot be written: {error.strerror or error}"
        ) from error


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """Inside, SIGTERM unwinds as Ctrl-C does, so that scratch folders are removed; a second one ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _short(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 300 else text[:297] + "..."
