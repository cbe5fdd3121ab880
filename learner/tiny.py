"""The tiny model: a real Llama of 0.89 M parameters over 15 symbols, warm-started to know sums and to err on purpose.

`python -m echo2.learner.tiny --out learner/data` makes the committed weights. The recipe, all on training prompts:
right sums until held-out ones come out right too, then demonstrations of which 70 % are wrong in one digit. What
results knows the sum and samples it about every third time: reinforcement learning has something to find, finds it
within tens of steps, and cannot have been handed it. (Two wide layers: four narrow ones learn the training sums by
heart and stay near 0.9 on the others.)

Deterministic on one machine for one seed; another machine's last bits differ, which is why the weights are committed.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from echo2.tasks.arithmetic import Arithmetic
from echo2.tasks.model_card import TOKENIZER_FILE, ModelCard, tokenizer_sha256, write_model_card

from .policy import pad_tokens, save_policy, token_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from echo2.tasks.task import Split

NAME = "tiny"
WEIGHTS = Path(__file__).with_name("data") / "tiny.safetensors"
"""Float16: 1.8 MB in the repository instead of 3.6, and far finer than what one training step changes."""

SPECIAL_SYMBOLS = ("<pad>", "<bos>", "<eos>")
PAD, BOS, EOS = range(3)
SYMBOLS = (*SPECIAL_SYMBOLS, *"0123456789", "+", "=")
CONTEXT_TOKENS = 64
"""The longest prompt and answer are 9; the rest is room for a caller's longer `tokens_max`."""

CLEAN_STEPS = 350
NOISY_STEPS = 550
WRONG_SHARE = 0.7
BATCH_ROWS = 128
LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.1


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    """The architecture with random weights drawn from `seed`; torch's own generator is left as it was."""
    config = LlamaConfig(
        vocab_size=len(SYMBOLS),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def tiny_tokenizer() -> Tokenizer:
    """One token a character: byte-level BPE without a single merge, so llama.cpp's `gpt-2` does exactly the same."""
    vocabulary = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(symbol, special=True, normalized=False) for symbol in SPECIAL_SYMBOLS])
    return tokenizer


def prepare_tiny(folder: Path) -> ModelCard:
    """Writes the tiny model's folder, the committed weights expanded to float32, into the existing `folder`."""
    model = tiny_model()
    weights = {name: weight.float() for name, weight in load_file(WEIGHTS).items()}
    model.load_state_dict(weights, strict=False)  # the tied output weights are not in the file
    save_policy(model, folder)
    return write_tiny_card(folder)


def write_tiny_card(folder: Path) -> ModelCard:
    """Writes tokeniser and card beside weights that are there or will be."""
    tiny_tokenizer().save(str(folder / TOKENIZER_FILE))
    card = ModelCard(
        name=NAME,
        architecture="llama",
        tokenizer_sha256=tokenizer_sha256(folder),
        vocabulary_size=len(SYMBOLS),
        context_tokens=CONTEXT_TOKENS,
        stop_ids=(EOS,),
        special_ids=(PAD, BOS, EOS),
    )
    write_model_card(folder, card)
    return card


def wrong_answer(answer: int, rng: random.Random) -> int:
    """A sum with one digit wrong: any other units digit, or the tens off by one or two. Never negative, never right."""
    if rng.random() < 0.5:
        return answer - answer % 10 + rng.choice([digit for digit in range(10) if digit != answer % 10])
    return answer + 10 * rng.choice([step for step in (-2, -1, 1, 2) if answer + 10 * step >= 0])


def demonstrations(seed: int) -> Iterator[list[tuple[str, str]]]:
    """Each training step's (prompt, answer) pairs: right ones first, then 70 % wrong ones. Training prompts only."""
    task = Arithmetic()
    rng = random.Random(seed)
    for step in range(CLEAN_STEPS + NOISY_STEPS):
        pairs = []
        for _ in range(BATCH_ROWS):
            index = rng.randrange(task.train_size)
            answer = int(task.answer("train", index))
            if step >= CLEAN_STEPS and rng.random() < WRONG_SHARE:
                answer = wrong_answer(answer, rng)
            pairs.append((task.prompt("train", index).text, str(answer)))
        yield pairs


def warm_start(seed: int = 0) -> LlamaForCausalLM:
    """The recipe: supervised training on `demonstrations`, the loss on answer and <eos> only. About two minutes."""
    model = tiny_model(seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)
    steps = CLEAN_STEPS + NOISY_STEPS
    for step, pairs in enumerate(demonstrations(seed)):
        for group in optimizer.param_groups:
            decay = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
            group["lr"] = LEARNING_RATE * decay * min(1.0, (step + 1) / WARMUP_STEPS)
        tokens, mask = encode_pairs(pairs)
        loss = -token_logprobs(model, tokens, mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def encode_pairs(pairs: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] of prompt, answer and <eos>, and the mask of answer and <eos>."""
    ids = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    rows = [[*(ids[symbol] for symbol in prompt + answer), EOS] for prompt, answer in pairs]
    tokens = pad_tokens(rows)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for line, row, (prompt, _) in zip(mask, rows, pairs, strict=True):
        line[len(prompt) : len(row)] = True
    return tokens, mask


@torch.no_grad()
def right_share(model: LlamaForCausalLM, split: Split) -> float:
    """The exact probability that a response sampled at T = 1 is right, averaged over a split: no sampling noise."""
    task = Arithmetic()
    size = task.train_size if split == "train" else task.heldout_size
    pairs = [(task.prompt(split, index).text, task.answer(split, index)) for index in range(size)]
    return float(token_logprobs(model, *encode_pairs(pairs)).sum(dim=1).exp().mean())


def main() -> None:
    """Makes the weights and says what they are worth."""
    parser = argparse.ArgumentParser(prog="python -m echo2.learner.tiny", description="Warm-start the tiny model.")
    parser.add_argument("--out", type=Path, required=True, help=f"folder to write {WEIGHTS.name} into")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # sums in another order would give other weights
    model = warm_start(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: parameter.detach().half() for name, parameter in model.named_parameters()},
        arguments.out / WEIGHTS.name,
    )
    train, heldout = right_share(model, "train"), right_share(model, "heldout")
    sys.stdout.write(f"{arguments.out / WEIGHTS.name}: right at T = 1: train {train:.3f}, held-out {heldout:.3f}\n")


if __name__ == "__main__":
    main()
