"""What `echo2 submit` says of a run, in words."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from echo2.tasks.scorer_wire import printable

if TYPE_CHECKING:
    from .preview import Seen
    from .submit import Report


def text_of(shown: Report, *, examples: int = 3) -> str:
    """The report in words, for a terminal of 100 columns or a file."""
    lines = ["Settings (value, and where it comes from)"]
    width = max(len(key) for key, _, _ in shown.resolved)
    lines += [f"  {key:<{width}}  {_short(value):<24}  {origin}" for key, value, origin in shown.resolved]
    lines += ["", *_seen_lines(shown.seen, examples), "", *_forecast_lines(shown)]
    lines += ["", "Warnings" if shown.warnings else "No warnings."]
    lines += [f"  - {warning}" for warning in shown.warnings]
    return "\n".join(lines)


def _seen_lines(seen: Seen, examples: int) -> list[str]:
    lines = [
        "What nodes see",
        f"  model {seen.model}, {seen.context_tokens} tokens of context; answers never leave the coordinator",
        f"  {seen.train} training prompts, {seen.heldout} held out",
        "  sampling: " + ", ".join(f"{name} {value}" for name, value in seen.sampling.items()),
    ]
    if seen.turns:
        lines.append(f"  {seen.turns}")
    for number, prompt in enumerate(seen.prompts[:examples], 1):
        lines.append(f"  example {number}: {prompt.tokens} tokens, at most {prompt.tokens_max} in answer")
        lines += [f"    | {printable(line)}" for line in prompt.text.splitlines() or [""]]
    return lines


def _forecast_lines(shown: Report) -> list[str]:
    found, supply = shown.forecast, shown.supply
    if found is None or supply is None:
        return ["No forecast: not known are " + ", ".join(shown.missing), "  (state them, or name a --coordinator)"]
    cost = "no price: forecast.price_node_hour and price_learner_hour are not both stated"
    if found.dollars is not None:
        cost = f"{found.dollars:.2f} dollars, {found.dollars_learner or 0:.2f} of them for the learner"
    needed = "none is enough" if found.mu_min is None else f"needs {found.mu_min:.3g}, aims at {found.mu_target:.3g}"
    bound = "" if found.staleness_bound is None else f" (bound without S: {found.staleness_bound})"
    lines = [
        "Forecast",
        f"  time        {duration(found.seconds)}; a step {found.step_seconds:.3g} s, decided by {found.bound_by}",
        f"  price       {cost}",
        f"  pool        {supply.nodes} nodes make {found.mu_pool:.3g} rollouts a second; the run {needed}",
        f"  bubble      {100 * found.bubble:.0f} % of the learner's time is waiting",
        f"  staleness   at most {found.staleness}{bound}",
        f"  a lease     {found.lease_samples} samples, {found.lease_seconds:.3g} s; "
        + ("fits" if found.feasible else "does not fit the budget, see the warnings"),
    ]
    if found.eval_answers:
        lines.append(f"  evaluations {found.eval_answered} of {found.eval_answers} answers each")
    return lines


def duration(seconds: float) -> str:
    """Hours and minutes, or seconds."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def _short(value: object) -> str:
    return "-" if value is None else json.dumps(value, ensure_ascii=False)
