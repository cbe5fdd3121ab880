"""A child of `learner.py`: one trainer on one fixed batch, a step whenever it is told to.

Answers are lines of JSON on standard output; standard error is the trainer's own.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

MIB = 1 << 20
LEARNING_RATE = 1e-6
GRADIENT_CLIP = 1.0


@dataclass(frozen=True)
class Rollout:
    """What both sides train on. Rewards are never equal within a group."""

    group: int
    prompt: list[int]
    response: list[int]
    reward: float


def make_rollouts(order: dict[str, Any], vocabulary: int) -> list[Rollout]:
    """Prompts of 40-80 tokens and responses of `order`'s range, uniform; random ids, since arithmetic does not read."""
    rng = np.random.default_rng(order["seed"])
    low, high = order["responses"]
    made = []
    for group in range(order["groups"]):
        prompt = rng.integers(100, vocabulary, size=int(rng.integers(40, 81))).tolist()
        for sample in range(order["size"]):
            response = rng.integers(100, vocabulary, size=int(rng.integers(low, high + 1))).tolist()
            made.append(Rollout(group, prompt, response, float(sample % 2)))
    return made


class Orders:
    """The other end of the parent's pipe; what libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._started = (0.0, 0.0)
        self._loaded_bytes = 0

    def loaded(self) -> None:
        """The model is in memory and nothing was trained: peak memory counts from here."""
        Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark starts again
        self._loaded_bytes = _status_bytes("VmRSS")

    def next_step(self, **facts: Any) -> None:
        """Say how the step before went, wait for the order to make another; ends the process when there is none."""
        wall, cpu = time.perf_counter() - self._started[0], time.process_time() - self._started[1]
        peak = _status_bytes("VmHWM")
        answer = {"seconds": wall, "cpu_seconds": cpu, "loaded": self._loaded_bytes, "peak": peak, **facts}
        print(json.dumps(answer), file=self._out, flush=True)
        if not sys.stdin.readline():
            raise SystemExit(0)  # from within TRL's loop too
        self._started = (time.perf_counter(), time.process_time())


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def run_ours(order: dict[str, Any], rollouts: list[Rollout], orders: Orders) -> None:
    """`TorchTrainer.train_now`, as the learner calls it."""
    from echo2.learner.config import LearnerConfig
    from echo2.learner.interfaces import Batch, Group
    from echo2.learner.trainer import TorchTrainer
    from echo2.p2p.codec import pack_logprobs, pack_tokens
    from echo2.p2p.identity import Identity
    from echo2.p2p.messages import AdmittedRollout

    peer = Identity(b"n" * 32).peer_id
    with tempfile.TemporaryDirectory() as home:
        settings = {
            "home": Path(home),
            "coordinator": f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",
            "run": "bench",
            "model_dir": Path(order["model"]),
            "threads": order["threads"],
            "train": {
                "learning_rate": LEARNING_RATE,
                "gradient_clip": GRADIENT_CLIP,
                "micro_tokens": order["micro_tokens"],
                "dtype": order["dtype"],
            },
            "objective": {"updates_per_step": order["updates"], "normalise_std": False},
        }
        trainer = TorchTrainer(LearnerConfig(**settings))
        # The sampler's: then the ratio to it is 1, and the gradient is TRL's, which knows no sampler.
        logprobs = _logprobs(trainer.model, rollouts)
        records = [
            AdmittedRollout(
                sequence=1,
                lease_id=index.to_bytes(16, "big"),
                ordinal=rollout.group,
                sample=index,
                peer=peer,
                version=0,
                prompt_tokens=pack_tokens(rollout.prompt),
                tokens=pack_tokens(rollout.response),
                logprobs=pack_logprobs(logprobs[index]),
                finish="stop",
                temperature=1.0,
                reward=rollout.reward,
            )
            for index, rollout in enumerate(rollouts)
        ]
        groups = sorted({rollout.group for rollout in rollouts})
        batch = Batch(0, tuple(Group(g, tuple(r for r in records if r.ordinal == g)) for g in groups))
        orders.loaded()
        facts: dict[str, Any] = {}
        while True:
            orders.next_step(**facts)
            stats = trainer.train_now(batch)
            facts = {"gradient_norm": stats.gradient_norm, "loss": stats.loss, "updates": stats.updates}


def _logprobs(model: Any, rollouts: list[Rollout]) -> list[Any]:
    """What the model gives each response's tokens."""
    import torch

    from echo2.learner.policy import token_logprobs

    found = []
    with torch.no_grad():
        for rollout in rollouts:
            tokens = torch.tensor([rollout.prompt + rollout.response])
            mask = torch.arange(tokens.shape[1])[None] >= len(rollout.prompt)
            found.append(token_logprobs(model, tokens, mask)[0, len(rollout.prompt) :].numpy())
    return found


def run_trl(order: dict[str, Any], rollouts: list[Rollout], orders: Orders) -> None:
    """`GRPOTrainer.train`, its generation replaced by the batch through its own `rollout_func`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(order["threads"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(Path(order["model"]) / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=torch.float32, attn_implementation="sdpa")
    size = sum(rollout.group == 0 for rollout in rollouts)
    orders.loaded()

    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        orders.next_step(updates=trainer.state.global_step, gradient_norm=norms[-1] if norms else 0.0)
        return {
            "prompt_ids": [rollout.prompt for rollout in rollouts],
            "completion_ids": [rollout.response for rollout in rollouts],
            "logprobs": None,
        }

    def rewards(completions: list[str], **_: Any) -> list[float]:
        return [rollout.reward for rollout in rollouts]

    micro = order["micro"]
    per_update = len(rollouts) // order["updates"]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=order["dtype"] == "bf16",
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=per_update // micro,
            steps_per_generation=len(rollouts) // micro,
            num_generations=size,
            max_completion_length=order["responses"][1],
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            loss_type="dapo",  # the mean over the tokens of the update, TRL's default and ours
            scale_rewards="none",
            max_grad_norm=GRADIENT_CLIP,
            beta=0.0,
            temperature=1.0,
            max_steps=1_000_000,
            report_to="none",
            save_strategy="no",
            logging_strategy="steps",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": str(index)} for index in range(64)]),
            processing_class=tokenizer,
            rollout_func=rollout_func,
        )
        trainer.train()


def main() -> None:
    order = json.loads(sys.argv[1])
    orders = Orders()
    rollouts = make_rollouts(order, order["vocabulary"])
    {"ours": run_ours, "trl": run_trl}[order["kind"]](order, rollouts, orders)


if __name__ == "__main__":
    main()
