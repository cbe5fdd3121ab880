"""Tables of settings for the documents, made from the code: `python -m echo2.coordinator.settings_doc PAGE` does it.

A page marks each with `<!-- settings NAME -->` and `<!-- end -->`; a test compares.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticUndefined

from .config import AdmissionConfig, RunConfig
from .plan_command import NodeClassSettings, PlanSettings
from .run_file import ForecastSettings

if TYPE_CHECKING:
    from echo2.p2p.settings import Settings

TABLES: dict[str, type[Settings]] = {
    "run": RunConfig,
    "admission": AdmissionConfig,
    "forecast": ForecastSettings,
    "plan": PlanSettings,
    "nodes": NodeClassSettings,
}

DEFAULTS = {"run.kappa": "S - 1", "plan.kappa": "S - 1", "run.learner": "made by submit", "run.task_options": "`{}`"}
"""Those that the field itself does not say."""

_MARKED = re.compile(r"(<!-- settings (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def settings_table(name: str) -> str:
    """A Markdown table: each key with its default, as TOML has it, and what it means."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in TABLES[name].model_fields.items():
        default = DEFAULTS.get(f"{name}.{key}", _default(field.default))
        rows.append(f"| `{key}` | {default} | {field.description or ''} |".replace("|  |", "| |"))
    return "\n".join(rows) + "\n"


def rewritten(page: str) -> str:
    """The page with its marked tables as the code has them."""
    return _MARKED.sub(lambda match: match[1] + settings_table(match[2]) + match[3], page)


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is None:
        return ""
    return f"`{json.dumps(value)}`"


def main(paths: list[str]) -> None:
    """Rewrite each page in place."""
    for path in map(Path, paths):
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
