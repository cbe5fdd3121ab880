"""One process of a learner of several, driven by `test_sharded`: `sharded_host.py JOB`, place in the environment.

JOB is JSON: {"home", "model_dir", "report", "config", "tasks": [...]}. The first process does the tasks in turn and
writes what it saw to `report`; the others help until told to end.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from unit.learner.test_trainer import COORDINATOR, mixed, sample

from echo2.learner.config import LearnerConfig
from echo2.learner.helper import serve
from echo2.learner.interfaces import Progress
from echo2.learner.launch import follow_first, place_in
from echo2.learner.policy import load_policy
from echo2.learner.team import Team
from echo2.learner.trainer import TorchTrainer

STEPS = 10
LEAST_FLOAT = b"\xff\xff\x7f\xff"


class Host:
    """The first process: trainers on the same model, spread over the team or alone."""

    def __init__(self, job, team):
        self.job = job
        self.team = team
        self.model_dir = Path(job["model_dir"])
        self.sampler, _ = load_policy(self.model_dir)

    def config(self, home, **changes):
        return LearnerConfig.model_validate(
            {
                "home": Path(self.job["home"]) / home,
                "model_dir": self.model_dir,
                "run": "demo",
                "coordinator": f"/ip4/127.0.0.1/tcp/1/p2p/{COORDINATOR}",
                **self.job["config"],
                **changes,
            }
        )

    def trainer(self, home, *, together, **changes):
        return TorchTrainer(self.config(home, **changes), self.team if together else None)

    def batch(self, step):
        """Groups of unequal sizes and lengths; in every third step one is without spread."""
        return sample(self.sampler, groups=5, size=3 + step % 2, seed=step, version=0, shift=0.1, rewards=mixed)

    def same_steps(self):
        """Both take the same steps from the same start: what they measured, and how far their weights are apart."""
        ours, alone = self.trainer("ours", together=True), self.trainer("alone", together=False)
        apart, stats = [], []
        for step in range(STEPS):
            batch = self.batch(step)
            stats.append([vars_of(trainer.train_now(batch)) for trainer in (ours, alone)])
            apart.append(max(difference(ours._read(name), alone._read(name)) for name in alone._state.parameters))
        state = max(
            difference(ours._read(name, key), alone._read(name, key)) for name, key in alone._state.state_shapes()
        )
        return {"apart": apart, "stats": stats, "state": state, "shards": shards(ours)}

    def checkpoints(self):
        """What a team keeps goes on in one process and the other way round, and is published as the same bytes."""
        ours = self.trainer("kept", together=True)
        ours.train_now(self.batch(0))
        ours._save(Progress(run="demo", epoch=0, version=1))
        files = {path.name: path for path in (Path(self.job["home"]) / "kept" / "checkpoints").glob("*/*")}
        spread = ours._export(0, 1, adapter=False).read_bytes()
        alone = self.trainer("kept", together=False)
        alone._restore()
        same = all(torch.equal(ours._read(name), alone._read(name)) for name in alone._state.parameters)
        alone._save(Progress(run="demo", epoch=1, version=1))
        whole = {path.name: path for path in (Path(self.job["home"]) / "kept" / "checkpoints").glob("e000001*/*")}
        equal = {
            name: files[name].read_bytes() == whole[name].read_bytes()
            for name in ("weights.safetensors", "optimizer.safetensors")
        }
        exported = alone._export(1, 1, adapter=False).read_bytes() == spread
        alone.train_now(self.batch(1))
        again = self.trainer("kept", together=True)
        again._restore()
        again.train_now(self.batch(1))
        apart = max(difference(again._read(name), alone._read(name)) for name in alone._state.parameters)
        return {"same": same, "files": equal, "exported": exported, "snapshot_bytes": len(spread), "apart": apart}

    def faults(self):
        """An update with an exploding ratio is left out by all, with the same culprits; the next step is as ever."""
        objective = {"ratio_cap": "off"}
        ours = self.trainer("f1", together=True, objective=objective)
        alone = self.trainer("f2", together=False, objective=objective)
        batch = self.batch(0)
        group = batch.groups[-1]
        first = group.rollouts[0]
        claimed = first.model_copy(update={"logprobs": LEAST_FLOAT * (len(first.tokens) // 4)})
        broken = type(batch)(0, (*batch.groups[:-1], type(group)(group.ordinal, (claimed, *group.rollouts[1:]))))
        seen = []
        for trainer in (ours, alone):
            stats = trainer.train_now(broken)
            trainer.train_now(self.batch(1))
            culprits = [culprit.model_dump(mode="json") for culprit in stats.culprits]
            seen.append({"skipped": stats.updates_skipped, "culprits": culprits})
        apart = max(difference(ours._read(name), alone._read(name)) for name in alone._state.parameters)
        return {"seen": seen, "apart": apart}

    def count_for_ever(self):
        """Steps without end, the number of each on stdout, until something ends this process."""
        ours = self.trainer("ours", together=True)
        step = 0
        while True:
            ours.train_now(self.batch(step % 2))
            step += 1
            print(step, flush=True)

    def idle(self):
        """Nothing to do for as long as stdin is open."""
        self.trainer("ours", together=True)
        print("ready", flush=True)
        sys.stdin.read()
        ours = self.trainer("ours", together=True)
        ours.train_now(self.batch(0))
        return {"trained": True}


def vars_of(stats):
    values = {name: getattr(stats, name) for name in stats.__slots__}
    return {name: value for name, value in values.items() if isinstance(value, float | int | tuple)}


def difference(left, right):
    return float((left - right).abs().max())


def shards(trainer):
    """Numbers this process holds of all it would hold alone."""
    parameters = trainer._state.parameters.values()
    return [sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)]


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    seconds = job.get("seconds", 60)
    torch.set_num_threads(1)
    place = place_in(os.environ)
    if place is not None and place.rank:
        follow_first(place)
        serve(place, seconds=seconds, threads=1)
        return
    team = Team(seconds=seconds)
    if place is not None:
        team.join(place)
    host = Host(job, team)
    report = {task: getattr(host, task)() for task in job["tasks"]}
    team.close()
    Path(job["report"]).write_text(json.dumps(report, default=str))


if __name__ == "__main__":
    main()
