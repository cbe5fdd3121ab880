"""The policy: a model folder as torch weights, and the log-probability of the tokens it is said to have drawn.

The same for the tiny model and for SmolLM2: a `transformers` causal language model in float32. Nothing here reaches
the network, and weights are read from safetensors only: a pickle runs code.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import transformers

from echo2.p2p.errors import ConfigurationError
from echo2.tasks.model_card import load_model_card

from .architectures import architecture_of, named_architecture
from .attention import PACKED, Layout
from .logprobs import chunked_logprobs
from .reading import read_table, reading

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from echo2.tasks.model_card import ModelCard

    from .packing import Pack

transformers.utils.logging.disable_progress_bar()  # a daemon's stderr is log lines and nothing else

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


def load_policy(folder: Path) -> tuple[PreTrainedModel, ModelCard]:
    """The float32 model of a model folder, in eval mode (it has no dropout: training evaluates it the same way).

    Raises ConfigurationError when the folder is not a model folder or its files do not fit together.
    """
    try:
        card = load_model_card(folder)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise ConfigurationError(f"the model folder {folder} has no {name}; prepare the folder again")
    with reading(f"the model in {folder}", "cannot be loaded"):
        kind = read_table(folder / CONFIG_FILE)["model_type"]
        if kind != card.architecture:
            raise ValueError(f"its card says {card.architecture}, its {CONFIG_FILE} {kind}")
        model, report = named_architecture(card.architecture).model.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=PACKED,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    # Left to itself transformers draws missing weights at random and only warns: a run would train noise.
    lost = sorted({*report["missing_keys"], *report["unexpected_keys"], *map(str, report["mismatched_keys"])})
    if lost:
        raise ConfigurationError(f"{folder / WEIGHTS_FILE} does not fit {CONFIG_FILE}: {', '.join(lost[:3])}")
    if model.config.vocab_size != card.vocabulary_size:
        raise ConfigurationError(
            f"{folder}: the card says {card.vocabulary_size} symbols, {CONFIG_FILE} says {model.config.vocab_size}"
        )
    architecture_of(model.config)  # what could not be published is not trained
    model.config.use_cache = False
    return cast("PreTrainedModel", model.eval()), card


def save_policy(model: PreTrainedModel, folder: Path) -> None:
    """Writes `config.json` and `model.safetensors`, as Hugging Face lays them out, in the model's own precision."""
    model.save_pretrained(folder)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Computes activations again in the backward pass instead of keeping them."""
    model.train()  # transformers asks for it before it checkpoints; attention here has no dropout to be switched on
    # The name changed within transformers 5; the old one still works there, with a warning on a daemon's stderr.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def packed_logprobs(
    model: PreTrainedModel, pack: Pack, targets: Tensor, temperature: Tensor, *, chunk: int, entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """log softmax(logits / T) of a pack's sampled tokens, float32 [M], and the entropy in nats or zeros.

    `targets` int64 [M] are those tokens, `temperature` float32 [M] each one's; logits exist for `chunk` of them at
    once. The numbers of `token_logprobs` on padded rows, up to rounding; on the CPU, wherever the model is, since what
    is done with them is little. Raises ConfigurationError for a model whose attention cannot be replaced.
    """
    if model.config._attn_implementation != PACKED:
        try:
            model.set_attn_implementation(PACKED)
        except ValueError as error:
            raise ConfigurationError(f"this model's attention cannot be packed: {_first_line(error)}") from error
    device = model.device
    hidden = model.get_decoder()(
        input_ids=torch.from_numpy(pack.tokens)[None].to(device),
        position_ids=torch.from_numpy(pack.positions)[None].to(device),
        use_cache=False,
        layout=Layout(pack.lengths, pack.alone),
    ).last_hidden_state[0]
    weight = model.get_output_embeddings().weight
    logprobs, spread = chunked_logprobs(
        hidden.index_select(0, torch.from_numpy(pack.source).to(device)),
        weight,
        targets.to(device),
        temperature.to(device),
        chunk=chunk,
        entropy=entropy,
    )
    return logprobs.cpu(), spread.cpu()


def pad_tokens(rows: list[list[int]]) -> Tensor:
    """Rows of token ids as one int64 batch [B, T], padded on the right with id 0.

    On the right, so that attention needs no mask: a causal model's real tokens never see what stands behind them.
    """
    batch = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for row, tokens in zip(batch, rows, strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    return batch


def token_logprobs(model: PreTrainedModel, tokens: Tensor, mask: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log softmax(logits / T) of each masked token, given the tokens before it: float32 [B, T], 0 elsewhere.

    `tokens` is int64 [B, T], padded on the right; `mask` is bool [B, T], true where a token was sampled; `temperature`
    one number, or float32 [B], one a row. Element [b, t] belongs to tokens[b, t], so column 0 is always 0.
    """
    return token_logprobs_and_entropy(model, tokens, mask, temperature, entropy=False)[0]


def token_logprobs_and_entropy(
    model: PreTrainedModel,
    tokens: Tensor,
    mask: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, and the entropy in nats of each of those distributions (detached; zeros if not asked for).

    Logits exist only for masked positions: a prompt's would be most of the memory at a vocabulary of 49,152. They are
    divided by T in place and never copied into a full log-softmax.
    """
    target = mask.clone()
    target[:, 0] = False  # nothing precedes the first token, so no distribution it was drawn from
    rows, columns = target.nonzero(as_tuple=True)
    hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden[rows, columns - 1]).float()
    if isinstance(temperature, torch.Tensor):
        logits = logits.div_(temperature.to(logits.dtype)[rows, None])
    elif temperature != 1.0:
        logits = logits.div_(temperature)
    normaliser = logits.logsumexp(dim=-1)
    chosen = logits.gather(1, tokens[rows, columns][:, None])[:, 0] - normaliser
    dense = torch.zeros(tokens.shape, dtype=torch.float32)
    spread = torch.zeros(tokens.shape, dtype=torch.float32)
    if entropy:
        with torch.no_grad():
            logprobs = logits.detach() - normaliser.detach()[:, None]
            spread[rows, columns] = -(logprobs.exp() * logprobs).sum(dim=-1)
    return dense.index_put((rows, columns), chosen), spread


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
