"""Snapshots of real GRPO on SmolLM2-135M, for `delta.py`: `python tests/bench/delta_publishes.py DIR PUBLISHES`.

Each publish is kappa = 2 training steps of the learner's own trainer, two optimiser updates each, learning rate 1e-6,
all else by default. Rollouts are drawn with the weights last published, as nodes would: 8 prompts a step in groups of
8, temperature 1, at most 16 tokens, sums of two digits of reasoning_gym with two examples (as in `loop_vs_trl.py`).

`DIR/v0.bf16.gguf`, `DIR/v2.bf16.gguf`, ... and the same in q8_0 are what would be published. What is there already is
not made again: the trainer goes on from its checkpoint, so a run may be made in parts. A publish takes one to three
minutes of one core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

KAPPA = 2
GROUPS, N = 8, 8
TOKENS_MAX = 16
LEARNING_RATE = 1e-6
MICRO_TOKENS = 2048
DOMAINS = ("bf16", "q8_0")
TASK = {
    "dataset_options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "train_size": 2000,
    "shots": 2,
    "prefill": "Answer:",
}


def snapshot_path(folder: Path, version: int, domain: str) -> Path:
    """Where a version's snapshot lies."""
    return folder / f"v{version}.{domain}.gguf"


def make_publishes(folder: Path, publishes: int) -> None:
    """Train until so many publishes after version 0 are there."""
    import torch
    from transformers import AutoModelForCausalLM

    from echo2.learner.config import LearnerConfig
    from echo2.learner.gguf_export import export_gguf
    from echo2.learner.interfaces import Progress
    from echo2.learner.smollm2 import prepare_smollm2
    from echo2.learner.trainer import TorchTrainer
    from echo2.learner.vocabulary import load_vocabulary
    from echo2.p2p.identity import Identity
    from echo2.tasks.reasoning_gym_task import ReasoningGymTask

    model_folder = folder / "model"
    if not (model_folder / "model.safetensors").is_file():
        model_folder.mkdir(parents=True, exist_ok=True)
        prepare_smollm2(model_folder)
    peer = Identity(b"n" * 32).peer_id
    settings: dict[str, Any] = {
        "home": folder / "home",
        "coordinator": f"/ip4/127.0.0.1/tcp/1/p2p/{peer}",
        "run": "bench",
        "model_dir": model_folder,
        "threads": 1,
        "checkpoints_kept": 2,
        "train": {"learning_rate": LEARNING_RATE, "micro_tokens": MICRO_TOKENS},
    }
    trainer = TorchTrainer(LearnerConfig(**settings))
    progress = trainer._restore()
    version = progress.version if progress else 0
    vocabulary = load_vocabulary(model_folder)
    task = ReasoningGymTask("chain_sum", **TASK)
    task.prepare()
    sampler = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, attn_implementation="sdpa").eval()

    def export() -> None:
        for domain in DOMAINS:
            path = snapshot_path(folder, version, domain)
            if not path.exists():
                export_gguf(trainer.model, vocabulary, path, domain)

    export()
    while version < publishes * KAPPA:
        sampler.load_state_dict(trainer.model.state_dict())
        batches = [_batch(sampler, trainer, task, version, version + ahead, peer) for ahead in range(KAPPA)]
        for batch in batches:
            stats = trainer.train_now(batch)
            rewards = [rollout.reward for rollout in batch.rollouts]
            words = {
                "step": batch.step,
                "reward": sum(rewards) / len(rewards),
                "groups_without_spread": stats.groups_without_spread,
                "updates": stats.updates,
                "gradient_norm": stats.gradient_norm,
                "kl": stats.kl_sampler_learner,
                "tokens": sum(len(rollout.tokens) // 4 for rollout in batch.rollouts),
            }
            print(json.dumps(words), flush=True)
        version += KAPPA
        trainer._save(Progress(run="bench", epoch=0, version=version))
        export()


def _batch(sampler: Any, trainer: Any, task: Any, version: int, step: int, peer: str) -> Any:
    """The rollouts of one step, drawn with the weights of `version`."""
    from tokenizers import Tokenizer

    from echo2.learner.interfaces import Batch, Group
    from echo2.p2p.codec import pack_logprobs, pack_tokens
    from echo2.p2p.messages import AdmittedRollout

    tokenizer = Tokenizer.from_file(str(Path(sampler.name_or_path) / "tokenizer.json"))
    stop = trainer.card.stop_ids[0]
    groups = []
    for ordinal in range(step * GROUPS, (step + 1) * GROUPS):
        prompt = task.prompt("train", ordinal % task.train_size)
        text = trainer.card.wrap(prompt.text) + prompt.prefill
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        rollouts = []
        for sample, (tokens, logprobs) in enumerate(_draw(sampler, ids, stop, seed=ordinal)):
            ended = tokens[-1] == stop
            response = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
            rollouts.append(
                AdmittedRollout(
                    sequence=1,
                    lease_id=(ordinal * N + sample).to_bytes(16, "big"),
                    ordinal=ordinal,
                    sample=sample,
                    peer=peer,
                    version=version,
                    prompt_tokens=pack_tokens(ids),
                    tokens=pack_tokens(tokens),
                    logprobs=pack_logprobs(logprobs),
                    finish="stop" if ended else "length",
                    temperature=1.0,
                    reward=task.score(prompt, response).reward,
                )
            )
        groups.append(Group(ordinal, tuple(rollouts)))
    return Batch(step, tuple(groups))


def _draw(sampler: Any, prompt: list[int], stop: int, *, seed: int) -> Iterator[tuple[list[int], list[float]]]:
    """N responses to a prompt, whose keys and values are computed once, with their log-probabilities."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn: list[tuple[list[int], list[float]]] = [([], []) for _ in range(N)]
    with torch.no_grad():
        out = sampler(torch.tensor([prompt]), use_cache=True)
        cache, logits = out.past_key_values, out.logits[:, -1].expand(N, -1)
        cache.batch_repeat_interleave(N)
        for _ in range(TOKENS_MAX):
            logprobs = logits.log_softmax(-1)
            chosen = torch.multinomial(logprobs.exp(), 1, generator=generator)
            for row, (tokens, words) in enumerate(drawn):
                if not tokens or tokens[-1] != stop:
                    tokens.append(int(chosen[row]))
                    words.append(float(logprobs[row, tokens[-1]]))
            if all(tokens[-1] == stop for tokens, _ in drawn):
                break
            out = sampler(chosen, past_key_values=cache, use_cache=True)
            logits = out.logits[:, -1]
    yield from drawn


if __name__ == "__main__":
    make_publishes(Path(sys.argv[1]).absolute(), int(sys.argv[2]))
