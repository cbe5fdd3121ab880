"""Hugging Face folders of every architecture that may be trained: real in all but their size."""

# ruff: noqa: RUF001 - letters that look like others are what is tested

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML_TEMPLATE = """\
{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
LLAMA3_TEMPLATE = """\
{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

ALPHABETS = {
    "latin": "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZéèüßñçøåÆœŁžİı",
    "cyrillic": "абвгдежзийклмнопрстуфхцчшщъыьэюяАБВГДЁЇЄҐ",
    "greek": "αβγδεζηθικλμνξοπρστυφχψωΆΈάέ",
    "cjk": "的一是不了人我在有他这中大来上国漢字仮名交じり文日本語한국어조선말ァアィイ々〆ヶ",
    "arabic": "ابتثجحخدذرزسشصضطظعغفقكلمنهويءآأؤإئىةًٌٍَُِّْ٠١٢٣٤٥",
    "hebrew": "אבגדהוזחטיכלמנסעפצקרשתְֱֲֳִֵֶַָֹֻּ",
    "devanagari": "अआइईउऊएऐओऔकखगघचछजझटठडढणतथदधनपफबभमयरलवशषसहािीुूेैोौ्ंः१२३",
    "thai": "กขคงจฉชซฌญฎฏฐฑฒณดตถทธนบปผพภมยรลวศษสหอฮะาำิีึืุูเแโใไ็่้๊๋์",
    "digits": "01234567890123456789٣४५৬๗²³½Ⅷ①",
    "spaces": "      \t\t\n\n\r\v\f\u00a0\u2003\u3000\u200b\u2028\u0085",
    "marks": "áẽn̈o̊q̣̇ç̧ṩ̣‍҈⃝",
    "emoji": "😀🎉👍🏽👩‍💻👨‍👩‍👧‍👦🏳️‍🌈🇫🇷🇩🇪❤️1️⃣☺⚡",
    "punctuation": '!"#$%&()*+,-./:;<=>?@[]^_`{|}~¡¿«»“”‘’—…·¶§©®™€£¥°±×÷',
    "odd": "\x00\x01\x1b\x7f\ufeff\ufffd\ufffe\u202e\u2066\ue000\U000f0000\U0001d538\U00010400\U000e0061ﷺﬁǅʰ",
}

WORDS = (
    *("def f(x):\n    return x ** 2  # square\n", "for (int i = 0; i < n; ++i) {\r\n\ta[i] += 1;\r\n}\n"),
    *(
        '{"key": [1, 2.5e-10, null]}',
        "SELECT * FROM t WHERE id='7';",
        "x=3.14159265358979",
        "https://example.org/a?b=c#d",
    ),
    *(
        "don't",
        "I'LL",
        "we've",
        "it'S",
        "they'Re",
        "'tis",
        "rock'n'roll",
        " 's",
        "''d",
        "I'm",
        "'M'",
        "can't've",
        "don'ſ",
    ),
    *("the ", "Hello, world! ", "naïve café ", "1234567 ", "  two  spaces", "\n\n\n", "   \n  \t\n x", " \r\n", "    "),
    *("Привет, мир! ", "今日は世界。", "안녕하세요 세계 ", "مرحبا بالعالم ", "नमस्ते दुनिया ", "สวัสดีชาวโลก", "Γειά σου "),
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
        "<|im_st",
        "|>",
        "<think>",
        "</think>",
        "<tool_call>",
    ),
)


def texts(count: int, seed: int = 0) -> list[str]:
    """Strings of many scripts, and of many in one: the same ones for the same seed."""
    rng = random.Random(seed)
    alphabets = list(ALPHABETS.values())

    def piece() -> str:
        kind = rng.random()
        if kind < 0.3:
            return rng.choice(WORDS)
        if kind < 0.36:  # anything that Unicode may hold but halves of surrogate pairs, assigned or not
            return "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(3))
        alphabet = rng.choice(alphabets)
        return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 9)))

    return ["".join(piece() for _ in range(rng.randint(1, 8))) for _ in range(count)]


@functools.cache
def tokenizer_json(kind: str) -> str:
    """A byte-level BPE tokeniser, trained on the spot, that splits text as `kind` (llama.cpp's word for it) does."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    if kind == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    elif kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    else:
        pattern = GPT4_PATTERN.replace("DIGITS", r"\p{N}" if kind == "qwen2" else r"\p{N}{1,3}")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    special = LLAMA3 if kind == "llama-bpe" else CHATML
    trainer = trainers.BpeTrainer(
        vocab_size=2500,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(2500, seed=1), trainer)
    if kind == "qwen2":
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
    if kind == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{LLAMA3[0]} $A", special_tokens=[(LLAMA3[0], tokenizer.token_to_id(LLAMA3[0]))]
        )
    return tokenizer.to_str()


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 5000.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("smollm", {}),
    "llama-untied": ("gpt-2", {"tie_word_embeddings": False}),
    "llama-biases": ("gpt-2", {"attention_bias": True, "mlp_bias": True}),
    "llama-3": ("llama-bpe", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": False, "head_dim": 32}),
    "llama-linear": ("smollm", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen2", {"head_dim": 32}),
    "qwen3-untied": ("qwen2", {"head_dim": 16, "tie_word_embeddings": False}),
}
"""Name (its first word is the architecture) to tokeniser and what differs from the plainest configuration."""

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def small_model(name: str, vocabulary: int, **changes: Any) -> Any:
    """Weights large enough that a wrong permutation, rope base or norm shows in the first digit."""
    kind = name.partition("-")[0]
    config_class, model_class = _CLASSES[kind]
    settings = {**SIZES, "rope_parameters": DEFAULT_ROPE, "tie_word_embeddings": True, **MODELS[name][1], **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = model_class(config_class(vocab_size=vocabulary, **settings)).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15 if parameter.ndim > 1 else 0.7)
    return model


def write_folder(folder: Path, name: str, *, shards: int = 1, dtype: torch.dtype = torch.float32) -> Any:
    """A folder as the hub has it: weights in one file or several, tokeniser, chat template, ends of a response.

    Returns the model whose weights it holds.
    """
    kind = MODELS[name][0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind), encoding="utf-8")
    ids = Tokenizer.from_str(tokenizer_json(kind))
    special = LLAMA3 if kind == "llama-bpe" else CHATML
    # Wider than the tokeniser, as Qwen's are.
    model = small_model(name, ids.get_vocab_size() + 27).to(dtype)
    model.config.bos_token_id, model.config.eos_token_id = ids.token_to_id(special[0]), ids.token_to_id(special[1])
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    end, of_text = (special[4], special[1]) if kind == "llama-bpe" else (special[2], special[0])
    ends = [ids.token_to_id(of_text), ids.token_to_id(end)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    template = LLAMA3_TEMPLATE if kind == "llama-bpe" else CHATML_TEMPLATE
    settings = {
        "bos_token": special[0],
        "eos_token": {"__type": "AddedToken", "content": end, "special": True},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return model
    where = {name: f"model-{1 + index % shards:05}-of-{shards:05}.safetensors" for index, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return model
