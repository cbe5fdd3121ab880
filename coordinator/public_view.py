"""What a stranger may see of a run: what it learns, how far it is, and what the volunteers did for it.

No peer ids, addresses, prices or reasons: what is not in these records is not shown. A name is what the node's owner
chose; nodes of one name are one contributor.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .views import View

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .views import NodeView, RunView

CONTRIBUTORS_MAX = 200
"""Those with the most rollouts; the rest are counted."""


class PublicPoint(View):
    """The mean reward of a step, or of the held-out prompts under a version."""

    at: int
    reward: float


class Contributor(View):
    """What the nodes of one name did."""

    name: str
    nodes: int
    trained_on: int
    """Rollouts that the learner has trained on."""
    accepted: int
    """Rollouts that passed the checks, those included."""


class PublicRunView(View):
    """A run, for everybody."""

    run: str
    task: str
    model: str
    state: str
    steps_done: int
    steps: int
    version: int | None
    reward: tuple[PublicPoint, ...]
    heldout: tuple[PublicPoint, ...]
    """Held-out prompts, whole evaluations only, by version."""
    nodes_now: int
    """At work or late, not standing by."""
    nodes_ever: int
    rollouts_trained_on: int
    contributors: tuple[Contributor, ...]
    """The most first."""
    contributors_left_out: int


def public_view(run: RunView, nodes: Sequence[NodeView]) -> PublicRunView:
    """Of what an operator sees, the part for everybody."""
    count: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    let_in = [node for node in nodes if node.state != "applied"]  # else anybody could write a name on the page
    for node in let_in:
        count[node.name] += 1
        trained[node.name] += node.rollouts.consumed
        accepted[node.name] += node.accepted
    ranked = sorted(count, key=lambda name: (-trained[name], -accepted[name], name))
    return PublicRunView(
        run=run.run,
        task=run.task,
        model=run.model,
        state=run.state,
        steps_done=run.learner_version,
        steps=run.steps,
        version=run.version,
        reward=tuple(PublicPoint(at=step.step, reward=step.reward_mean) for step in run.series),
        heldout=tuple(
            PublicPoint(at=evaluation.version, reward=evaluation.mean)
            for evaluation in run.evaluations
            if evaluation.complete and evaluation.mean is not None
        ),
        nodes_now=sum(node.state == "active" and node.health != "dead" and not node.standby for node in nodes),
        nodes_ever=len(let_in),
        rollouts_trained_on=run.rollouts.consumed,
        contributors=tuple(
            Contributor(name=name, nodes=count[name], trained_on=trained[name], accepted=accepted[name])
            for name in ranked[:CONTRIBUTORS_MAX]
        ),
        contributors_left_out=max(0, len(ranked) - CONTRIBUTORS_MAX),
    )
