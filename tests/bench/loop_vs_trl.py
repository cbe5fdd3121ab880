"""Seconds to the same held-out reward, our whole loop against TRL: `python tests/bench/loop_vs_trl.py --out DIR`.

Both train SmolLM2-135M on the same data set of reasoning_gym on this machine alone: 32 rollouts a step in groups of 8,
temperature 1, at most `TOKENS_MAX` tokens, two optimiser updates a step, learning rate 1e-5, float32, as many threads
in all as the machine has cores. Ours is `echo2 demo`'s processes (coordinator, learner, one node with llama.cpp, a
thread each for the last two); TRL's is `GRPOTrainer` with its own generation, all threads. Ours first, then TRL's.

Neither is timed while it is judged. Ours: time counts from when the base model is measured and the first training lease
goes out; version v is there when its checkpoint is. TRL: from the first step; weights are set aside every kappa steps,
and that is not counted. Afterwards one judge draws `SAMPLES` responses to each held-out prompt from each set of
weights, the same for both. The target is `TARGET_SHARE` of the smaller of both gains above the base model; when a curve
passes it is read off by straight lines. Takes 1-2 hours and 20 GB of disk on two cores; `--quick` only shows that all
parts work. The last line is JSON. The data set was chosen by hand: see LOG.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

DATASET = "chain_sum"
DATASET_OPTIONS: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SHOTS, PREFILL = 2, "Answer:"
TRAIN_SIZE = 100
"""There are few sums of two digits: these leave more than half of the held-out ones unseen; the rest are left out."""
HELDOUT, HELDOUT_QUICK = 100, 8
TOKENS_MAX = 16
R, N, KAPPA, S = 32, 8, 2, 3
LEARNING_RATE = 1e-5
STEPS, STEPS_QUICK = 30, 2
STEPS_OURS = 60
"""Ours goes on, to show where it ends; the comparison is of the first `STEPS`."""
SAMPLES = 4
TARGET_SHARE = 0.8
MICRO_TOKENS = 2048
JUDGED_AT_ONCE = 64
POLL_SECONDS = 0.2
WEIGHTS = "weights.safetensors"


def make_task(heldout: int) -> Any:
    """The task itself, in this process: the judge's and TRL's rewards. (Ours are given by the coordinator's worker.)"""
    from echo2.tasks.reasoning_gym_task import ReasoningGymTask

    task = ReasoningGymTask(
        DATASET, DATASET_OPTIONS, train_size=TRAIN_SIZE, heldout_size=heldout, shots=SHOTS, prefill=PREFILL
    )
    task.prepare()
    return task


# ours


def run_ours(out: Path, steps: int, heldout: int) -> None:
    """The demo's processes on this task. Sets each version's weights aside as soon as its checkpoint is there."""
    from echo2.coordinator import demo
    from echo2.coordinator.demo_options import DemoOptions, Places, Preset, coordinator_settings

    preset = Preset(
        task="reasoning_gym",
        S=S,
        kappa=KAPPA,
        R=R,
        n=N,
        learning_rate=LEARNING_RATE,
        domain="f16",
        micro_tokens=MICRO_TOKENS,
        steps=steps,
        tokens_max=TOKENS_MAX,
        slice_samples_max=8,
        lease_seconds=600,
        stall_seconds=1200,
    )
    options = DemoOptions(
        model="smollm2", preset=preset, nodes=1, steps=steps, S=S, kappa=KAPPA, learning_rate=LEARNING_RATE, seed=0,
        out=out / "ours", screen=False,
    )  # fmt: skip
    places = Places(out / "ours")

    def settings(*arguments: Any, **named: Any) -> str:
        task = {
            "dataset": DATASET, "train_size": TRAIN_SIZE, "heldout_size": heldout, "shots": SHOTS, "prefill": PREFILL,
        }  # fmt: skip
        lines = [f"{key} = {json.dumps(value)}" for key, value in task.items()]
        lines += ["[run.task_options.dataset_options]", *(f"{k} = {json.dumps(v)}" for k, v in DATASET_OPTIONS.items())]
        return "\n".join([coordinator_settings(*arguments, **named), "[run.task_options]", *lines, ""])

    demo.coordinator_settings = settings  # the demo has no way to say what a task is told, and no user needs one
    begun: list[float] = []

    def show(state: Any) -> None:
        if state.phase == "training" and not begun:
            begun.append(time.time())

    over = threading.Event()
    keeper = threading.Thread(target=_set_aside, args=(places.learner / "home" / "checkpoints", out, over))
    keeper.start()
    try:
        outcome = demo.run_demo(options, places, show, lambda event: print(f"ours: {event}", file=sys.stderr))
    finally:
        over.set()
        keeper.join()
    if outcome.code or not begun:
        raise SystemExit(f"our run failed: {'; '.join(outcome.words)}")
    found = [(int(path.name.split("-v")[1]), path.stat().st_mtime) for path in out.glob("ours-v*")]
    times = {str(version): max(0.0, at - begun[0]) for version, at in sorted(found)}
    (out / "ours.json").write_text(json.dumps(times))


def _set_aside(checkpoints: Path, out: Path, over: threading.Event) -> None:
    """A second link to each checkpoint's weights, which stays when the learner deletes the checkpoint."""
    while not over.wait(POLL_SECONDS):
        for path in checkpoints.glob("e*-v*/progress.json"):
            if path.parent.suffix:  # still being written
                continue
            kept = out / f"ours-v{int(path.parent.name.split('-v')[1])}"
            if not kept.exists():
                os.link(path.parent / WEIGHTS, kept)


# TRL


def run_trl(out: Path, steps: int, threads: int) -> None:
    """`GRPOTrainer` on the same prompts, in a process of its own."""
    import torch
    from datasets import Dataset
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from echo2.tasks.model_card import load_model_card

    torch.set_num_threads(threads)
    folder = out / "ours" / "work" / "model"
    card, task = load_model_card(folder), make_task(HELDOUT)
    end = "<|im_end|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=end, pad_token=end, padding_side="left"
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    prompts = [task.prompt("train", index) for index in range(TRAIN_SIZE)]
    rows = [{"prompt": card.wrap(prompt.text) + prompt.prefill, "index": index} for index, prompt in enumerate(prompts)]
    times: dict[str, float] = {}

    def rewards(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [task.score(prompts[place], text).reward for place, text in zip(index, completions, strict=True)]

    class Keeper(TrainerCallback):  # type: ignore[misc]
        begun = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = self.begun or time.time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (2 * KAPPA) == 0:  # two updates are one step of ours
                now = time.time()
                version = state.global_step // 2
                times[str(version)] = now - self.begun
                kept = {name: parameter.detach() for name, parameter in model.named_parameters()}
                save_file(kept, out / f"trl-v{version}")
                self.begun += time.time() - now  # what judging needs is not training

    config = GRPOConfig(
        output_dir=str(out / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=R // 2 // 8,
        steps_per_generation=R // 8,
        num_generations=N,
        max_completion_length=TOKENS_MAX,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        loss_type="dapo",
        beta=0.0,
        temperature=1.0,
        max_steps=2 * steps,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Keeper()],
    )
    trainer.train()
    (out / "trl.json").write_text(json.dumps(times))


# the judge


def judge(out: Path, threads: int, heldout: int) -> dict[str, dict[int, float]]:
    """Mean held-out reward of each version of each side; version 0, the base model, is the same for both."""
    import torch
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from echo2.tasks.model_card import load_model_card

    torch.set_num_threads(threads)
    folder = out / "ours" / "work" / "model"
    card, task = load_model_card(folder), make_task(heldout)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    taught = {task.prompt("train", index).text for index in range(TRAIN_SIZE)}  # the prefill is the same for all
    unseen = [prompt for index in range(heldout) if (prompt := task.prompt("heldout", index)).text not in taught]
    prompts = [prompt for prompt in unseen for _ in range(SAMPLES)]
    texts = [card.wrap(prompt.text) + prompt.prefill for prompt in prompts]
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    stop = card.stop_ids[0]

    def reward() -> float:
        torch.manual_seed(0)
        total = 0.0
        for first in range(0, len(prompts), JUDGED_AT_ONCE):
            part = encoded[first : first + JUDGED_AT_ONCE]
            width = max(map(len, part))
            ids = torch.tensor([[stop] * (width - len(row)) + row for row in part])
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in part])
            with torch.no_grad():
                drawn = model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=TOKENS_MAX,
                    eos_token_id=stop,
                    pad_token_id=stop,
                )
            for prompt, row in zip(prompts[first : first + JUDGED_AT_ONCE], drawn[:, width:].tolist(), strict=True):
                response = row[: row.index(stop)] if stop in row else row
                total += task.score(prompt, tokenizer.decode(response, skip_special_tokens=True)).reward
        return total / len(prompts)

    curves: dict[str, dict[int, float]] = {}
    base = reward()
    for side in ("ours", "trl"):
        versions = sorted(int(version) for version in json.loads((out / f"{side}.json").read_text()))
        curves[side] = {0: base}
        for version in versions:
            if version:
                weights = load_file(out / f"{side}-v{version}")
                assert weights.keys() == dict(model.named_parameters()).keys()  # tied weights are kept once
                model.load_state_dict(weights, strict=False)
                curves[side][version] = reward()
                print(f"{side} version {version}: {curves[side][version]:.3f}", file=sys.stderr, flush=True)
    return curves


def seconds_to(target: float, times: Sequence[float], rewards: Sequence[float]) -> float | None:
    """When the curve first reaches `target`, by straight lines between its points; None when it never does."""
    for place, reward in enumerate(rewards):
        if reward >= target:
            if place == 0:
                return times[0]
            before = rewards[place - 1]
            share = (target - before) / (reward - before)
            return times[place - 1] + share * (times[place] - times[place - 1])
    return None


def compare(out: Path, curves: dict[str, dict[int, float]]) -> dict[str, Any]:
    """The figures of the last line."""
    base = curves["ours"][0]
    compared = [[reward for version, reward in curve.items() if version <= STEPS] for curve in curves.values()]
    target = base + TARGET_SHARE * min(max(rewards) - base for rewards in compared)
    figures: dict[str, Any] = {"base": round(base, 4), "target": round(target, 4)}
    for side, curve in curves.items():
        at = {0: 0.0} | {int(v): s for v, s in json.loads((out / f"{side}.json").read_text()).items() if int(v)}
        versions = sorted(curve)
        reached = seconds_to(target, [at[v] for v in versions], [curve[v] for v in versions])
        figures[f"{side}_s"] = None if reached is None else round(reached, 1)
        figures[f"{side}_end_s"] = round(at[versions[-1]], 1)
        figures[f"{side}_end"] = round(curve[versions[-1]], 4)
    ours, trl = figures["ours_s"], figures["trl_s"]
    figures["ratio"] = round(trl / ours, 2) if ours and trl else None
    return figures


def plot(out: Path, curves: dict[str, dict[int, float]]) -> None:
    """Held-out reward against minutes, as `loop_vs_trl.png`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for side, curve in curves.items():
        at = {0: 0.0} | {int(v): s for v, s in json.loads((out / f"{side}.json").read_text()).items()}
        versions = sorted(curve)
        name = "ECHO-2" if side == "ours" else "TRL"
        label = f"{name}, {versions[-1]} steps"
        axes.plot([at[v] / 60 for v in versions], [curve[v] for v in versions], marker=".", label=label)
    axes.set(xlabel="minutes of training", ylabel="held-out reward", ylim=(0, 1), title=f"SmolLM2-135M, {DATASET}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out / "loop_vs_trl.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="Our whole loop beside TRL's.")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--quick", action="store_true", help="two steps: shows that everything runs, says nothing")
    parser.add_argument("--part", choices=["ours", "trl", "judge"], help="only this part of an earlier --out")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="TRL's and the judge's")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    steps, heldout = (STEPS_QUICK, HELDOUT_QUICK) if arguments.quick else (STEPS, HELDOUT)
    steps_ours = STEPS_QUICK if arguments.quick else STEPS_OURS
    out.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(out).free < (2 + (steps + steps_ours) / KAPPA) * 6e8:
        raise SystemExit(f"{out}: the weights of all versions do not fit on this disk")
    if arguments.part == "ours":
        run_ours(out, steps_ours, heldout)
    elif arguments.part == "trl":
        run_trl(out, steps, arguments.threads)
    elif arguments.part == "judge":
        curves = judge(out, arguments.threads, heldout)
        (out / "curves.json").write_text(json.dumps(curves))
        plot(out, curves)
        print(json.dumps(compare(out, curves)))
    else:
        for part in ("ours", "trl", "judge"):  # each in a process of its own, with nothing of the one before
            quick = ["--quick"] if arguments.quick else []
            argv = [sys.executable, __file__, "--out", str(out), "--part", part, "--threads", str(arguments.threads)]
            subprocess.run([*argv, *quick], check=True)


if __name__ == "__main__":
    main()
