"""What a training step costs beside TRL's: `python tests/bench/learner.py [--quick] [--model DIR]`. Last line is JSON.

One batch, drawn once: SmolLM2-135M, 32 rollouts in groups of 8, prompts of 40-80 tokens, responses of 64-256, random
ids. Ours is `TorchTrainer.train_now`; TRL's is `GRPOTrainer.train`, its generation replaced by the batch through its
own `rollout_func`. Both in processes of their own, steps taken in turns so that a slow minute hits both; medians.

The same on both sides: float32 weights from the same files, AdamW (fused), token-mean GRPO loss without KL, advantages
not divided by a deviation, norm clipped at 1, threads, no gradient checkpointing. TRL runs 8 rollouts at once (its
default; its micro-batches are padded to the whole batch's longest prompt and response), ours `MICRO_TOKENS` tokens.

| setting     | forward and backward passes of every rollout                                                         |
|-------------|------------------------------------------------------------------------------------------------------|
| one update  | one and one on both sides: neither evaluates pi_old apart. The headline                               |
| two updates | TRL evaluates pi_old for all rollouts, ours for the second half only (the first update gives it)      |
| bf16        | one update, matrix products in bf16: TRL's autocast, ours `train.dtype = "bf16"`                      |

That both do the same work shows in the norm of the first gradient, which must agree. Tokens are prompt and response
tokens of all rollouts, padding not counted: the same number on both sides. Peak is resident memory (VmHWM): absolute,
and above what the process held with the model loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from learner_worker import MIB, make_rollouts

WORKER = Path(__file__).with_name("learner_worker.py")
MICRO_TOKENS = 2048
VOCABULARY = 49_152
SETTINGS = {
    "one update": {"updates": 1, "dtype": "f32"},
    "two updates": {"updates": 2, "dtype": "f32"},
    "bf16": {"updates": 1, "dtype": "bf16"},
}
HEADLINE = "one update"
FULL = {"groups": 4, "size": 8, "responses": [64, 256], "micro": 8, "seed": 0}
QUICK = {"groups": 2, "size": 4, "responses": [16, 64], "micro": 4, "seed": 0}
ROUNDS_FULL, ROUNDS_QUICK = 3, 2
NORM_TOLERANCE = {"f32": 1e-3, "bf16": 0.05}


class Trainer:
    """A worker process with one trainer."""

    def __init__(self, kind: str, order: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps({"kind": kind, **order})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.steps: list[dict[str, Any]] = []
        self._answer()

    def step(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.steps.append(self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a worker died; its error is above")
        return dict(json.loads(line))

    def median(self, key: str) -> float:
        """Over the steps after the first, which warms up."""
        return statistics.median(step[key] for step in self.steps[1:])

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def measure(order: dict[str, Any], rounds: int) -> dict[str, float]:
    """One setting."""
    rollouts = make_rollouts(order, VOCABULARY)
    tokens = sum(len(rollout.prompt) + len(rollout.response) for rollout in rollouts)
    trainers: dict[str, Trainer] = {}
    try:
        for kind in ("ours", "trl"):
            trainers[kind] = Trainer(kind, order)
        for _ in range(1 + rounds):
            for trainer in trainers.values():
                trainer.step()
    finally:
        for trainer in trainers.values():
            trainer.end()
    ours, trl = trainers["ours"], trainers["trl"]
    norms = [trainer.steps[0]["gradient_norm"] for trainer in (ours, trl)]
    agree = abs(norms[0] - norms[1]) <= NORM_TOLERANCE[order["dtype"]] * norms[1]
    if order["updates"] == 1 and not agree:  # with two, each side deals its own minibatches
        raise SystemExit(f"not the same work: the first gradient's norm is {norms[0]} and TRL's {norms[1]}")
    figures = {
        "ours_tok_s": tokens / ours.median("seconds"),
        "trl_tok_s": tokens / trl.median("seconds"),
        "ratio": statistics.median(
            their["seconds"] / our["seconds"] for our, their in zip(ours.steps[1:], trl.steps[1:], strict=True)
        ),
        "cpu_ratio": statistics.median(
            their["cpu_seconds"] / our["cpu_seconds"] for our, their in zip(ours.steps[1:], trl.steps[1:], strict=True)
        ),
    }
    for name, trainer in (("ours", ours), ("trl", trl)):
        last = trainer.steps[-1]
        figures[f"{name}_cpu_s"] = trainer.median("cpu_seconds")
        figures[f"{name}_peak_MiB"] = last["peak"] / MIB
        figures[f"{name}_above_MiB"] = (last["peak"] - last["loaded"]) / MIB
        figures[f"{name}_norm"] = trainer.steps[0]["gradient_norm"]
    return {key: float(f"{value:.4g}") for key, value in figures.items()}


def prepare(folder: Path) -> None:
    from echo2.learner.smollm2 import prepare_smollm2

    if not (folder / "model.safetensors").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        prepare_smollm2(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="A training step, ours beside TRL's.")
    parser.add_argument("--quick", action="store_true", help="8 short rollouts, the headline only: under a minute")
    parser.add_argument("--model", type=Path, help="SmolLM2's model folder, made there if missing")
    parser.add_argument("--setting", action="append", choices=list(SETTINGS), help="only these; default all")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    batch, rounds = (QUICK, ROUNDS_QUICK) if arguments.quick else (FULL, ROUNDS_FULL)
    chosen = arguments.setting or ([HEADLINE] if arguments.quick else list(SETTINGS))
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = (arguments.model or Path(scratch) / "model").absolute()
        prepare(model)
        for name in chosen:
            order = {
                "model": str(model),
                "threads": arguments.threads,
                "micro_tokens": MICRO_TOKENS,
                "vocabulary": VOCABULARY,
                **batch,
            }
            results[name] = measure(order | SETTINGS[name], arguments.rounds or rounds)
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    shown = results[HEADLINE if HEADLINE in results else chosen[0]]
    print(json.dumps({k: shown[k] for k in ("ours_tok_s", "trl_tok_s", "ratio", "ours_peak_MiB", "trl_peak_MiB")}))


if __name__ == "__main__":
    main()
