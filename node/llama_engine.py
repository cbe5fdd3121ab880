"""llama.cpp through its low-level API: many slices in one batch, seeded sampling, each prompt prefilled once.

A prompt's tokens belong to all samples of its slice at once (a token may have many sequence ids in the unified cache).
Finished sequences leave the batch and the next slices take their places. On small models Python's own time rules, so
the batch is filled, and its logits read, by numpy. Runs only inside the engine process (`engine_process`).
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from llama_cpp import llama_cpp as llama

from echo2.p2p.codec import pack_logprobs, pack_tokens, unpack_tokens
from echo2.p2p.messages import RolloutRecord

from .engine import EngineError, EngineOptions, OrderRefused, SliceOrder, SliceResult, SnapshotRefused
from .sampling import draw, keyed, uniforms

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

SEQUENCES_MAX = 256
"""llama.cpp's own bound on parallel sequences (LLAMA_MAX_SEQ)."""

BATCH_TOKENS = 2048
"""Tokens handed to one llama_decode; longer prompts go in pieces."""

MICRO_BATCH_TOKENS = 512
"""Tokens computed at once: larger buys nothing on CPUs and costs compute memory on GPUs."""

CELLS_MIN = 1024
"""Smallest cache, in tokens. Freeing a sequence scans all cells, so small models want a small cache."""

DRAW_ELEMENTS = 1 << 22
"""Logits converted to float64 at once: 32 MiB, whatever the vocabulary."""

_LEVEL_ERROR = 4
"""GGML_LOG_LEVEL_ERROR (0 none, 1 debug, 2 info, 3 warn, 4 error, 5 continuation)."""


@llama.llama_log_callback  # type: ignore[untyped-decorator]  # kept at module level: llama.cpp calls it for ever
def _log(level: int, text: bytes, _: ctypes.c_void_p) -> None:
    if level == _LEVEL_ERROR:
        print("llama.cpp:", text.decode("utf-8", "replace").rstrip(), file=sys.stderr, flush=True)


class LlamaEngine:
    """One GGUF model and its cache. Synchronous; every call blocks its thread."""

    def __init__(self, options: EngineOptions) -> None:
        llama.llama_log_set(_log, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self._options = options
        self._sequences = min(options.sequences, int(llama.llama_max_parallel_sequences()), SEQUENCES_MAX)
        self._model: Any = None
        self._adapter: Any = None
        self._context: Any = None
        self._cells = 0

    def load(self, path: Path) -> None:
        """Replace the model in memory (the old one goes first: two would not fit a GPU). Raises SnapshotRefused."""
        self.close()
        parameters = llama.llama_model_default_params()
        parameters.n_gpu_layers = self._options.gpu_layers
        parameters.use_extra_bufts = not self._options.plain_kernels
        self._model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            self._model = None
            raise SnapshotRefused(f"llama.cpp cannot load {path.name}: not a GGUF file it knows, or out of memory")
        self.vocabulary = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model)))
        self.context_tokens = int(llama.llama_model_n_ctx_train(self._model))
        self._cells_max = max(CELLS_MIN, (self._options.cache_mib << 20) // self._cell_bytes())

    def adapt(self, path: Path | None) -> None:
        """Put this adapter on the model in memory instead of the one before; None takes it off. Raises SnapshotRefused.

        The cache is made anew: llama.cpp sizes its graphs for the adapters that are there when it makes one.
        """
        if self._model is None:
            raise EngineError("no snapshot is loaded")
        self._close_context()
        self._free_adapter()
        if path is not None:
            self._adapter = llama.llama_adapter_lora_init(self._model, str(path).encode())
            if not self._adapter:
                self._adapter = None
                raise SnapshotRefused(f"llama.cpp cannot load {path.name}: not an adapter of the snapshot in use")

    def close(self) -> None:
        """Free model, adapter and cache."""
        self._close_context()
        self._free_adapter()
        if self._model is not None:
            llama.llama_model_free(self._model)
            self._model = None

    def generate(self, orders: Sequence[SliceOrder]) -> list[SliceResult]:
        """See `engine.Engine.generate`. Raises EngineError when llama.cpp or the model's numbers fail."""
        if self._model is None:
            raise EngineError("no snapshot is loaded")
        jobs = [_Job.of(order) for order in orders]
        for job in jobs:
            self._check(job)
        self._fit_context(sum(job.cells(job.count) for job in jobs))
        _Batch(self._context, self._sequences, self._cells, self.vocabulary).run(jobs)
        return [job.result() for job in jobs]

    def _check(self, job: _Job) -> None:
        tokens = len(job.prompt) + job.tokens_max
        if not len(job.prompt):
            raise OrderRefused("an order without a prompt token")
        if job.prompt.min() < 0 or job.prompt.max() >= self.vocabulary:
            raise OrderRefused(f"a prompt token is outside the model's vocabulary of {self.vocabulary}")
        if tokens > self.context_tokens:
            raise OrderRefused(f"prompt and response are {tokens} tokens, the model's context is {self.context_tokens}")
        if job.cells(1) > self._cells_max:
            raise OrderRefused(
                f"one sample needs a cache of {job.cells(1)} tokens, {self._options.cache_mib} MiB hold "
                f"{self._cells_max}; allow the engine more cache memory"
            )

    def _cell_bytes(self) -> int:
        model = self._model
        heads, kv_heads = int(llama.llama_model_n_head(model)), int(llama.llama_model_n_head_kv(model))
        # Qwen3's heads are wider than their share of the model's width.
        width = self._number("attention.key_length") or int(llama.llama_model_n_embd(model)) // max(heads, 1)
        return max(int(llama.llama_model_n_layer(model)) * kv_heads * width * 2 * 2, 1)  # keys, values; float16

    def _number(self, key: str) -> int | None:
        """A number that the snapshot says of its architecture; None when it does not."""
        buffer = ctypes.create_string_buffer(64)
        found = llama.llama_model_meta_val_str(self._model, b"general.architecture", buffer, len(buffer))
        key_of_architecture = buffer.value + b"." + key.encode() if found > 0 else b""
        found = llama.llama_model_meta_val_str(self._model, key_of_architecture, buffer, len(buffer))
        return int(buffer.value) if found > 0 and buffer.value.isdigit() else None

    def _fit_context(self, cells_wanted: int) -> None:
        """A cache for what is asked, up to the owner's bound; it grows by doubling and never shrinks."""
        cells = CELLS_MIN
        while cells < cells_wanted and cells < self._cells_max:
            cells *= 2
        cells = min(cells, self._cells_max)
        if self._context is not None and cells <= self._cells:
            return
        self._close_context()
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = cells
        parameters.n_batch = BATCH_TOKENS
        parameters.n_ubatch = MICRO_BATCH_TOKENS
        parameters.n_seq_max = self._sequences
        parameters.n_threads = parameters.n_threads_batch = self._options.threads
        parameters.kv_unified = True  # one cache for all: a prompt's cells are shared by its samples
        self._context = llama.llama_init_from_model(self._model, parameters)
        if not self._context:
            self._context = None
            raise EngineError(f"llama.cpp cannot make a cache of {cells} tokens: not enough memory")
        self._cells = int(llama.llama_n_ctx(self._context))
        if self._adapter is not None:
            adapters = (llama.llama_adapter_lora_p_ctypes * 1)(self._adapter)
            if llama.llama_set_adapters_lora(self._context, adapters, 1, (ctypes.c_float * 1)(1.0)) != 0:
                self._close_context()
                raise EngineError("llama.cpp cannot use the adapter")

    def _free_adapter(self) -> None:
        if self._adapter is not None:
            llama.llama_adapter_lora_free(self._adapter)
            self._adapter = None

    def _close_context(self) -> None:
        if self._context is not None:
            llama.llama_free(self._context)
            self._context, self._cells = None, 0


@dataclass(slots=True)
class _Job:
    """One order in work: its prompt as an array, and room for what its samples draw."""

    order: SliceOrder
    prompt: NDArray[np.int32]
    state: hashlib.blake2b
    stop_ids: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    lengths: NDArray[np.int64]
    stopped: NDArray[np.bool_]
    started: int = 0

    @classmethod
    def of(cls, order: SliceOrder) -> _Job:
        shape = (order.sample_count, order.sampling.tokens_max)
        return cls(
            order=order,
            prompt=unpack_tokens(order.prompt_tokens),
            state=keyed(order.seed),
            stop_ids=np.array(order.sampling.stop_ids, dtype=np.int32),
            tokens=np.empty(shape, dtype=np.int32),
            logprobs=np.empty(shape, dtype=np.float32),
            lengths=np.zeros(order.sample_count, dtype=np.int64),
            stopped=np.zeros(order.sample_count, dtype=np.bool_),
        )

    @property
    def count(self) -> int:
        return self.order.sample_count

    @property
    def tokens_max(self) -> int:
        return self.order.sampling.tokens_max

    def cells(self, samples: int) -> int:
        """Cache cells that `samples` of it can come to need; the last token drawn is never decoded."""
        return len(self.prompt) + samples * (self.tokens_max - 1)

    def result(self) -> SliceResult:
        return SliceResult(
            tuple(
                RolloutRecord(
                    sample=self.order.sample_first + row,
                    tokens=pack_tokens(self.tokens[row, : self.lengths[row]]),
                    logprobs=pack_logprobs(self.logprobs[row, : self.lengths[row]]),
                    finish="stop" if self.stopped[row] else "length",
                )
                for row in range(self.count)
            )
        )


@dataclass(slots=True)
class _Part:
    """Samples of one job that entered together and share their prompt's cells."""

    job: _Job
    slots: NDArray[np.int32]
    rows: NDArray[np.int64]
    left: int


class _Batch:
    """The running sequences. A slot is a sequence id; arrays are indexed by slot."""

    def __init__(self, context: Any, slots: int, cells: int, vocabulary: int) -> None:
        self._context = context
        self._memory = llama.llama_get_memory(context)
        self._vocabulary = vocabulary
        self._cells_free = cells
        self._free = list(range(slots - 1, -1, -1))
        self._active = np.empty(0, dtype=np.int32)
        self._part: list[_Part | None] = [None] * slots
        self._row = np.zeros(slots, dtype=np.int64)
        self._last = np.zeros(slots, dtype=np.int32)
        self._position = np.zeros(slots, dtype=np.int32)
        self._drawn = np.zeros(slots, dtype=np.int64)
        self._piece_tokens = int(llama.llama_n_batch(context))

    def run(self, jobs: Sequence[_Job]) -> None:
        llama.llama_memory_clear(self._memory, False)
        waiting = deque(jobs)
        while waiting or len(self._active):
            entered = self._admit(waiting)
            logits = self._decode(entered)
            self._draw(entered, logits)

    def _admit(self, waiting: deque[_Job]) -> list[_Part]:
        """Let samples in, oldest job first, while there are slots and cells for all they can come to need."""
        entered: list[_Part] = []
        while waiting and self._free:
            job = waiting[0]
            each = job.tokens_max - 1
            room = self._cells_free - len(job.prompt)
            fitting = len(self._free) if each == 0 and room >= 0 else max(room, 0) // max(each, 1)
            count = min(job.count - job.started, len(self._free), fitting)
            if count <= 0:
                break
            slots = np.array([self._free.pop() for _ in range(count)], dtype=np.int32)
            part = _Part(job, slots, np.arange(job.started, job.started + count), count)
            job.started += count
            self._cells_free -= job.cells(count)
            self._row[slots] = part.rows
            self._position[slots] = len(job.prompt)
            self._drawn[slots] = 0
            for slot in slots:
                self._part[slot] = part
            entered.append(part)
            if job.started == job.count:
                waiting.popleft()
        return entered

    def _decode(self, entered: list[_Part]) -> NDArray[np.float32]:
        """Run the last tokens of all active sequences and the entering prompts: their logits rows, in that order."""
        active = self._active
        prompts = [part.job.prompt for part in entered]
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        ones = np.ones(len(active), dtype=np.int32)
        tokens = np.concatenate([self._last[active], *prompts])
        positions = np.concatenate([self._position[active], *(np.arange(n, dtype=np.int32) for n in lengths)])
        sharers = np.concatenate([ones, np.repeat([part.left for part in entered], lengths)]).astype(np.int32)
        wanted = np.zeros(len(tokens), dtype=np.int8)
        wanted[: len(active)] = 1
        wanted[len(active) + np.cumsum(lengths) - 1] = 1
        # seq_id is an array of pointers: token i points at the run of `sharers[i]` ids in `ids`.
        ids = np.concatenate([active, *(part.slots for part in entered)])
        starts = len(active) + np.cumsum([0, *(part.left for part in entered[:-1])], dtype=np.int64)
        offsets = np.concatenate([np.arange(len(active)), np.repeat(starts[: len(entered)], lengths)])
        pointers = (ids.ctypes.data + 4 * offsets).astype(np.uint64)

        rows: list[NDArray[np.float32]] = []
        for first in range(0, len(tokens), self._piece_tokens):
            piece = slice(first, first + self._piece_tokens)
            count = len(tokens[piece])
            batch = llama.llama_batch()
            batch.n_tokens = count
            batch.token = _pointer(tokens[piece], ctypes.c_int32)
            batch.pos = _pointer(positions[piece], ctypes.c_int32)
            batch.n_seq_id = _pointer(sharers[piece], ctypes.c_int32)
            batch.seq_id = _pointer(pointers[piece], ctypes.POINTER(ctypes.c_int32))
            batch.logits = _pointer(wanted[piece], ctypes.c_int8)
            code = llama.llama_decode(self._context, batch)
            if code != 0:
                raise EngineError(f"llama_decode failed with code {code} on {count} tokens")
            outputs = int(wanted[piece].sum())
            if outputs:
                address = llama.llama_get_logits(self._context)
                view = np.ctypeslib.as_array(address, shape=(outputs, self._vocabulary))
                rows.append(view if first + self._piece_tokens >= len(tokens) else view.copy())
        self._position[active] += 1
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _draw(self, entered: list[_Part], logits: NDArray[np.float32]) -> None:
        slots = np.concatenate([self._active, *(part.slots for part in entered)])
        shares = np.array([part.left for part in entered], dtype=np.int64)
        rows = np.concatenate(
            [np.arange(len(self._active)), len(self._active) + np.repeat(np.arange(len(entered)), shares)]
        )
        parts = [part for slot in slots.tolist() if (part := self._part[slot])]
        tokens = np.empty(len(slots), dtype=np.int32)
        logprobs = np.empty(len(slots), dtype=np.float32)
        steps = self._drawn[slots]
        samples = [
            part.job.order.sample_first + row for part, row in zip(parts, self._row[slots].tolist(), strict=True)
        ]
        places = [part.job.order.drawn + step for part, step in zip(parts, steps.tolist(), strict=True)]
        u = uniforms([part.job.state for part in parts], samples, places)
        ended = steps + 1 >= [part.job.tokens_max for part in parts]
        stopped = np.zeros(len(slots), dtype=np.bool_)
        for chosen in _alike(parts):
            sampling, stop_ids = parts[chosen[0]].job.order.sampling, parts[chosen[0]].job.stop_ids
            step = max(1, DRAW_ELEMENTS // self._vocabulary)
            for first in range(0, len(chosen), step):
                some = chosen[first : first + step]
                tokens[some], logprobs[some] = draw(logits[rows[some]], u[some], sampling)
            stopped[chosen] = np.isin(tokens[chosen], stop_ids)

        jobs: dict[int, list[int]] = {}
        for index, part in enumerate(parts):
            jobs.setdefault(id(part.job), []).append(index)
        for indices in jobs.values():
            job, row = parts[indices[0]].job, self._row[slots[indices]]
            job.tokens[row, steps[indices]] = tokens[indices]
            job.logprobs[row, steps[indices]] = logprobs[indices]
            job.lengths[row] = steps[indices] + 1
            job.stopped[row] = stopped[indices]
        ended |= stopped
        self._last[slots] = tokens
        self._drawn[slots] = steps + 1
        self._active = np.ascontiguousarray(slots[~ended])
        self._leave(slots[ended].tolist())

    def _leave(self, slots: list[int]) -> None:
        for slot in slots:
            part = self._part[slot]
            if part is None:
                continue
            part.left -= 1
            self._part[slot] = None
            self._free.append(slot)
            # The prompt's cells are free only when the last of its samples leaves.
            self._cells_free += part.job.tokens_max - 1 + (len(part.job.prompt) if part.left == 0 else 0)
        if not len(self._active):
            llama.llama_memory_clear(self._memory, False)
            return
        for slot in slots:
            llama.llama_memory_seq_rm(self._memory, slot, -1, -1)


def _alike(parts: Sequence[_Part]) -> list[NDArray[np.int64]]:
    """Indices of `parts`, grouped by sampling parameters: nearly always one group."""
    groups: dict[int, list[int]] = {}
    keys: dict[Any, int] = {}
    for index, part in enumerate(parts):
        key = keys.setdefault(part.job.order.sampling, len(keys))
        groups.setdefault(key, []).append(index)
    return [np.array(group) for group in groups.values()]


def _pointer(array: NDArray[Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
