"""The tiny model's training loop in one process, for benches that ask what a sampler that is off costs: no network.

A plain loop around the real trainer: prompts from the curriculum, n samples each from the weights of an older version
as a snapshot would hold them, the task's reward, `TorchTrainer.train_now`. Sizes, steps and learning rate are those of
`echo2 demo`. What differs from a node: torch draws, not llama.cpp, with numbers from torch's generator; and weights of
q8_0 and the 16-bit domains are turned back to float32 before the products: what llama.cpp rounds within is not there.

Which version draws for step t. Versions 0, kappa, 2 kappa, ... are published, kappa = max(1, S - 1); step t trains on

    x(t) = the newest published version that is not above t - lag,  lag = S - kappa + 1 steps

so staleness t - x(t) runs through lag, lag + 1, ..., lag + kappa - 1 = S, again and again (for S = 0 it is 0; after
version 0, which all steps until then train on). With kappa = S - 1 the lag is 2: the most that the paper's appendix A
leaves for broadcast and the first R rollouts, ceil((T_bcast + R / mu_pool) / T_train) <= 2. It is figure 1 step by step
(S = 3, kappa = 2: staleness 3 in v3 -> v4 and v5 -> v6, and 2 in between) and figure 3b's setting (S of 3, 4, 6, 11,
all else as it is, kappa = S - 1). It is also the oldest that our pacing lets through: under x a lease goes out while
consumed, queued and outstanding are below (x + S + 1) R, so x serves the steps up to x + S. A real run is fresher.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from transformers import DynamicCache

from echo2.coordinator.demo_options import PRESETS
from echo2.learner.batch import collate
from echo2.learner.config import LearnerConfig, TrainSettings
from echo2.learner.interfaces import Batch, Group
from echo2.learner.loss import kl_estimate
from echo2.learner.packing import packs
from echo2.learner.policy import packed_logprobs
from echo2.learner.quantise import encoded, encoding_of
from echo2.learner.tiny import EOS, SPECIAL_SYMBOLS, SYMBOLS, prepare_tiny, right_share, tiny_model
from echo2.learner.trainer import TorchTrainer
from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.identity import Identity
from echo2.p2p.messages import AdmittedRollout
from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.curriculum import train_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from echo2.learner.batch import BatchArrays

DEMO = PRESETS["tiny"]
GROUPS = DEMO.R // DEMO.n
PEER = Identity(bytes([1]) * 32).peer_id
ADDRESS = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"
"""Of a coordinator that nobody dials: the trainer's configuration wants one."""

JUDGED_EVERY = 6
FINAL_EVERY, FINAL_COUNT = 2, 5
"""The final reward is the mean of the last 5 versions of an even distance to the end: one version alone jumps."""

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, 97.5 %, for 1, 2, ... degrees of freedom."""

SEEDS_MAX = len(T_QUANTILES) + 1


@dataclass(frozen=True, slots=True)
class Setting:
    """One run. `ratio`: "truncated" (C = 2, the default objective), or "none" (w = 1: as if the learner had drawn)."""

    S: int
    seed: int
    ratio: str = "truncated"
    domain: str = "f32"
    steps: int = DEMO.steps

    @property
    def key(self) -> str:
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


def sampled_from(step: int, budget: int) -> int:
    """x(t) of step `step` at S = `budget`."""
    kappa = max(1, budget - 1)
    return max(0, (step - (budget - kappa + 1)) // kappa * kappa)


def run(setting: Setting) -> dict[str, Any]:
    """The run's numbers: held-out reward by version (exact, at T = 1), and of each step reward, staleness, KL."""
    torch.set_num_threads(1)
    with trainer(setting) as learner:
        sampler = tiny_model().eval()
        original = tiny_model().eval() if setting.domain != "f32" else sampler
        weights = {0: copy_of(learner.model)}
        judged = judged_versions(setting.steps)
        curve = [[0, right_share(learner.model, "heldout")]]
        steps: list[dict[str, Any]] = []
        for step in range(setting.steps):
            version = sampled_from(step, setting.S)
            assert 0 <= step - version <= setting.S
            for old in [old for old in weights if old < version]:
                del weights[old]
            original.load_state_dict(weights[version])
            sampler.load_state_dict({name: published(w, setting.domain) for name, w in weights[version].items()})
            batch, domain_kl = draw(sampler, original, step=step, version=version, setting=setting)
            away = None
            if setting.ratio == "none":
                batch, away = as_if_its_own(batch, learner.model)
            stats = learner.train_now(batch)
            weights[step + 1] = copy_of(learner.model)
            if step + 1 in judged:
                curve.append([step + 1, right_share(learner.model, "heldout")])
            steps.append(
                {
                    "reward": statistics.fmean(rollout.reward for rollout in batch.rollouts),
                    "staleness": batch.staleness,
                    "kl": stats.kl_sampler_learner if away is None else away,
                    "domain_kl": domain_kl,
                    "truncated": stats.truncated_share,
                    "ratio_max": stats.ratio_max,
                    "entropy": stats.entropy,
                    "skipped": len(stats.updates_skipped),
                }
            )
    return {"curve": curve, "final": statistics.fmean([value for _, value in curve][-FINAL_COUNT:]), "steps": steps}


def judged_versions(steps: int) -> set[int]:
    return {*range(0, steps + 1, JUDGED_EVERY), *(steps - FINAL_EVERY * back for back in range(FINAL_COUNT))}


@contextmanager
def trainer(setting: Setting) -> Iterator[TorchTrainer]:
    with tempfile.TemporaryDirectory(prefix="echo2-bench-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        prepare_tiny(model)
        config = LearnerConfig(home=Path(folder) / "home", coordinator=ADDRESS, run="bench", model_dir=model)
        train = TrainSettings(learning_rate=DEMO.learning_rate, micro_tokens=DEMO.micro_tokens)
        yield TorchTrainer(config.model_copy(update={"train": train, "seed": setting.seed}))


def copy_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.state_dict().items()}


def published(weight: torch.Tensor, domain: str) -> torch.Tensor:
    """The weight as a snapshot of that domain holds it: encoded by the learner, decoded by gguf's own code."""
    encoding = encoding_of(weight.shape, domain)
    data = np.frombuffer(b"".join(encoded(weight, encoding)), dtype=np.uint8)
    floats = gguf.quants.dequantize(data.reshape(*weight.shape[:-1], -1), encoding.kind)
    return torch.from_numpy(np.array(floats, dtype=np.float32)).reshape(weight.shape)


def draw(sampler: Any, original: Any, *, step: int, version: int, setting: Setting) -> tuple[Batch, float]:
    """The rollouts of a step, and the k3-KL of the sampler to the weights it was rounded from."""
    task = Arithmetic()
    ordinals = range(step * GROUPS, (step + 1) * GROUPS)
    prompts = [task.prompt("train", train_index(setting.seed, ordinal, task.train_size)) for ordinal in ordinals]
    ids = torch.tensor([[SYMBOLS.index(letter) for letter in prompt.text] for prompt in prompts])
    source = torch.Generator().manual_seed(setting.seed << 32 | step)
    uniform = torch.rand(DEMO.R, DEMO.tokens_max, generator=source, dtype=torch.float64)
    tokens, logprobs = sample(sampler, ids, uniform)
    groups = []
    for place, (ordinal, prompt) in enumerate(zip(ordinals, prompts, strict=True)):
        rollouts = []
        for number in range(DEMO.n):
            row = place * DEMO.n + number
            response = until_stop(tokens[row].tolist())
            text = "".join(SYMBOLS[token] for token in response if token >= len(SPECIAL_SYMBOLS))
            rollouts.append(
                AdmittedRollout(
                    sequence=step * DEMO.R + row + 1,
                    lease_id=ordinal.to_bytes(16, "little"),
                    ordinal=ordinal,
                    sample=number,
                    peer=PEER,
                    version=version,
                    prompt_tokens=pack_tokens(ids[place].numpy()),
                    tokens=pack_tokens(response),
                    logprobs=pack_logprobs(logprobs[row, : len(response)].numpy()),
                    finish="stop" if response[-1] == EOS else "length",
                    temperature=1.0,
                    reward=task.score(prompt, text).reward,
                )
            )
        groups.append(Group(ordinal, tuple(rollouts)))
    batch = Batch(step, tuple(groups))
    if original is sampler:
        return batch, 0.0
    arrays = collate(batch)
    return batch, mean_kl(arrays, own_logprobs(arrays, original))


def until_stop(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


@torch.no_grad()
def sample(model: Any, prompts: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probabilities [B, T], n rows a prompt, at T = 1: the token in which u falls, as nodes do it."""
    cache = DynamicCache(config=model.config)
    logits = model(prompts, cache=cache, use_cache=True).logits[:, -1]
    cache.batch_repeat_interleave(DEMO.n)
    logits = logits.repeat_interleave(DEMO.n, dim=0)
    tokens = torch.full(uniform.shape, EOS)
    logprobs = torch.zeros(uniform.shape)
    going = torch.ones(len(tokens), dtype=torch.bool)
    for at in range(uniform.shape[1]):
        wide = logits.double().log_softmax(dim=-1)
        steps = wide.exp().cumsum(dim=-1)
        chosen = (steps < uniform[:, at : at + 1] * steps[:, -1:]).sum(dim=-1)
        tokens[going, at] = chosen[going]
        logprobs[:, at] = wide.gather(1, chosen[:, None])[:, 0].float()
        going &= chosen != EOS
        if not going.any():
            break
        logits = model(chosen[:, None], cache=cache, use_cache=True).logits[:, -1]
    return tokens, logprobs


@torch.no_grad()
def own_logprobs(arrays: BatchArrays, model: Any) -> np.ndarray:
    """log pi of the drawn tokens under `model`, float32 [B, T], evaluated as the trainer does."""
    own = np.zeros(arrays.tokens.shape, dtype=np.float32)
    rows = np.arange(len(own))
    for pack in packs(arrays.tokens, arrays.mask, arrays.group, rows, tokens_max=DEMO.micro_tokens):
        at = pack.rows, pack.columns
        targets, ones = torch.from_numpy(arrays.tokens[at]), torch.ones(len(pack.rows))
        own[at] = packed_logprobs(model, pack, targets, ones, chunk=TrainSettings().logprob_chunk_tokens)[0].numpy()
    return own


def mean_kl(arrays: BatchArrays, own: np.ndarray) -> float:
    """k3 of KL(sampler || own) over the drawn tokens."""
    ours, drawn = (torch.from_numpy(each[arrays.mask]) for each in (own, arrays.sampler_logprobs))
    return float(kl_estimate(ours, drawn).mean())


def as_if_its_own(batch: Batch, model: Any) -> tuple[Batch, float]:
    """The batch with log-probabilities of `model` in place of the sampler's, so that w = 1; and the KL they hide."""
    arrays = collate(batch)
    own = own_logprobs(arrays, model)
    lines = (pack_logprobs(row[drawn]) for row, drawn in zip(own, arrays.mask, strict=True))
    groups = tuple(
        Group(group.ordinal, tuple(each.model_copy(update={"logprobs": next(lines)}) for each in group.rollouts))
        for group in batch.groups
    )
    return Batch(batch.step, groups), mean_kl(arrays, own)


# many runs, and what they say together


def run_all(settings: Sequence[Setting], results: Path | None, minutes: float | None) -> dict[Setting, dict[str, Any]]:
    """All the runs; `results` keeps each as soon as it is done, so the next call goes on where this one stopped.

    Ends the process, in words, when `minutes` would be passed by one more run.
    """
    kept: dict[str, dict[str, Any]] = json.loads(results.read_text()) if results and results.exists() else {}
    begun, longest = time.monotonic(), 0.0
    for place, setting in enumerate(settings):
        if setting.key in kept:
            continue
        started = time.monotonic()
        if minutes is not None and started - begun + longest > 60 * minutes:
            raise SystemExit(f"{sum(s.key in kept for s in settings)} of {len(settings)} runs done; run it again")
        kept[setting.key] = run(setting)
        longest = max(longest, time.monotonic() - started)
        sys.stderr.write(
            f"{place + 1}/{len(settings)} {setting.key}: {kept[setting.key]['final']:.3f} "
            f"({time.monotonic() - started:.0f} s)\n"
        )
        if results:
            fresh = results.with_suffix(".new")
            fresh.write_text(json.dumps(kept))
            fresh.replace(results)
    return {setting: kept[setting.key] for setting in settings}


def interval(values: Sequence[float]) -> list[float]:
    """95 % interval of the mean, by Student's t over the seeds."""
    mean, half = statistics.fmean(values), 0.0
    if len(values) > 1:
        half = T_QUANTILES[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return [round(mean - half, 4), round(mean + half, 4)]


def step_mean(runs: Sequence[dict[str, Any]], name: str) -> float:
    """Mean of a number over all steps of all runs."""
    return statistics.fmean(step[name] for each in runs for step in each["steps"])


TOLERANCE = 0.05
"""How far below synchronous training the final reward may be: the paper's about 5 %."""

PAINT = ("#1f2933", "#0b69a3", "#2f9e8f", "#d97706", "#c2410c")


def draw_curves(path: Path, panels: dict[str, Any], *, synchronous: float | None = None) -> None:
    """Held-out reward by version: mean over the seeds, a band from the worst to the best of them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(1, len(panels), sharey=True, figsize=(5 * len(panels), 4), dpi=100, squeeze=False)
    for axes, (title, lines) in zip(all_axes[0], panels.items(), strict=True):
        for label, colour, runs in lines:
            versions = [version for version, _ in runs[0]["curve"]]
            values = np.asarray([[value for _, value in each["curve"]] for each in runs])
            axes.plot(versions, values.mean(axis=0), color=colour, linewidth=1.8, label=label)
            axes.fill_between(versions, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.12, linewidth=0)
        if synchronous is not None:
            axes.axhline(
                (1 - TOLERANCE) * synchronous,
                color="#7b8794",
                linewidth=1,
                linestyle=(0, (4, 3)),
                label="synchronous - 5 %",
            )
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("training step")
        axes.set_ylim(0.3, 1)
        axes.grid(axis="y", color="#e4e7eb")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
    all_axes[0][0].set_ylabel("held-out reward")
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    plt.close(figure)
