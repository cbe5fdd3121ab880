"""Every record that crosses a process boundary, with its size bound and its meaning.

Rules (DESIGN section 6):
- A frame is a msgpack map `{"type": TYPE, "body": {...}}`. Schema is strict: no missing or extra field, no coercion,
  no NaN. `BYTES_MAX` is checked against the announced length before anything is allocated.
- Durations are seconds from receipt, never wall-clock instants: home clocks are wrong.
- Token ids are raw little-endian int32, log-probabilities raw little-endian float32 (`codec.pack_*`).
- `Signed.payload` is kept and verified as the exact bytes received; it is parsed only after the signature holds.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KIB = 1024
MIB = 1024 * KIB

WIRE_VERSION = 1
"""Raised on any incompatible change; hello negotiates it and tells an old node what it needs."""

TOKENS_MAX = 131_072
"""Longest prompt or response, in tokens: the context of the largest model in view. Bounds 512 KiB of int32."""

SLICES_MAX = 64
"""Slices in one grant or one submission: one engine batch. More gains nothing and grows the frame."""

SAMPLES_MAX = 256
"""Samples in one slice; also the most in one group."""

CHUNK_BYTES_MAX = 4 * MIB
CHUNKS_MAX = 262_144
"""1 TiB of snapshot at 4 MiB a chunk: no real model is above it, so a larger manifest is an attack."""

VOCABULARY_MAX = 10_000_000
"""Tokens of a vocabulary: some forty times the largest in use, and far inside the int32 that token ids travel in."""

NODES_MAX = 16_384
"""Entries of one broadcast plan."""

LATE_MAX = 16
"""Relays that one node may name as late: more of them late at once is the fault of its own line."""

FETCH_CELLS_MAX = 256
"""Cells in which a node says which chunks of its download are here: a picture's worth, in 32 bytes."""

FETCH_SOURCES_MAX = 8
"""Peers that one node names as sending it chunks now; a plan gives it a handful."""

STEP_NODES_MAX = 64
"""Nodes whose mismatch one step's numbers carry, the largest first: what is to be looked at."""

STALENESS_BINS = 64
"""Of a step's histogram: rollouts of staleness 0, 1, ...; the last counts all that are staler still."""

STEP_DROPS_MAX = 64
"""Kinds of drops one step's numbers carry, the most frequent first."""

CULPRITS_MAX = 16
"""Rollouts named for one step's updates left out. With the three above, a step's numbers stay below 32 KiB."""

TURNS_MAX = 64
"""Turns of one episode (`tasks.sandbox`, which this layer could import but whose bound is the wire's)."""

TOKENIZER_PIECE_BYTES = MIB
"""Of `tokenizer.json` in one reply."""

TOKENIZER_BYTES_MAX = 64 * MIB
"""The largest in use is 33 MB; a node keeps it in memory."""

DETAILS_MAX = 32
"""Measures that one episode may return."""

PRICE_MICROS_MAX = 10**12
"""A million dollars an hour, in micro-dollars; a price beyond is a slip of the finger."""

RELAYED_MAX = 16
"""Senders that a node may acknowledge in one heartbeat. A plan has it take from three as a rule, the most of them."""

APPEAL_CHARS_MAX = 1024
"""Of an appeal: what a person writes who was wronged, not a correspondence."""

Text = Annotated[str, Field(max_length=512)]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
PeerId = Annotated[str, Field(min_length=40, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
Address = Annotated[str, Field(min_length=1, max_length=256)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
LeaseId = Annotated[bytes, Field(min_length=16, max_length=16)]
COUNT_MAX = 2**53
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
TokenBytes = Annotated[bytes, Field(max_length=4 * TOKENS_MAX)]
Spans = Annotated[tuple[Annotated[int, Field(ge=0, le=TOKENS_MAX)], ...], Field(max_length=2 * TURNS_MAX - 1)]
TokenId = Annotated[int, Field(ge=0, lt=VOCABULARY_MAX)]


class Record(BaseModel):
    """A frozen value. Nested inside messages or inside a signed payload; never a frame by itself."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Message(Record):
    """A record that travels as a frame of its own."""

    TYPE: ClassVar[str]
    BYTES_MAX: ClassVar[int] = 64 * KIB


class Signed(Record):
    """Exact bytes and the Ed25519 signature over `label + NUL + payload`; the key comes from the context."""

    payload: Annotated[bytes, Field(max_length=24 * MIB)]
    signature: Annotated[bytes, Field(min_length=64, max_length=64)]


class PeerAddress(Record):
    """Where a peer can be dialled. No address: it can dial out but not be dialled (a leaf)."""

    peer: PeerId
    addresses: Annotated[tuple[Address, ...], Field(max_length=16)] = ()


# any request


class Refusal(Message):
    """The answer to any request that is understood and declined. Raised at the asker as `errors.Refused`."""

    TYPE = "refusal"
    code: Name
    detail: Text
    retry_seconds: Seconds | None = None


class Ack(Message):
    """What the request asked to be kept is durable here."""

    TYPE = "ack"
    count: Count = 0


# hello: /echo2/hello/1


WIRE_VERSIONS_MAX = 16
"""That one process may speak: releases of several years."""


class Hello(Message):
    """First request of a node or learner to the coordinator; again after every reconnection.

    One that names only other wire versions than ours may have any further fields: no more of it is read than
    `wire_versions` and `software`, so that its sender can be told what it needs.
    `run`: the only run that a node takes part in; None where it goes to whichever the welcome names.

    `session` is that of the heartbeats to come. `home` names the folder in which the process runs, by a secret kept
    there; one process at a time runs in it. So a hello with the home of the session that went before proves a restart,
    and one with another, while that session lives, is a second machine with the same key.
    """

    TYPE = "hello"
    wire_versions: Annotated[tuple[int, ...], Field(min_length=1, max_length=WIRE_VERSIONS_MAX)]
    software: Text
    role: Literal["node", "learner"]
    name: Name
    token: Annotated[str, Field(max_length=128)] = ""
    addresses: Annotated[tuple[Address, ...], Field(max_length=16)] = ()
    run: Name | None = None
    price_micros_hour: Annotated[int, Field(ge=0, le=PRICE_MICROS_MAX)] = 0
    """What a node asks to be paid, in micro-dollars an hour; 0: it is a volunteer's."""
    session: Annotated[bytes, Field(min_length=16, max_length=16)] | None = None
    home: Annotated[bytes, Field(min_length=16, max_length=16)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_another_release(cls, value: Any) -> Any:
        versions = value.get("wire_versions") if isinstance(value, dict) else None
        if not isinstance(versions, tuple) or not 0 < len(versions) <= WIRE_VERSIONS_MAX:
            return value
        if WIRE_VERSION in versions or any(type(version) is not int for version in versions):
            return value
        software = value.get("software")
        named = software[:64] if isinstance(software, str) else "another release"
        return {"wire_versions": versions, "software": named, "role": "node", "name": "unread"}


class Sampling(Record):
    """How a token is drawn (DESIGN section 9). Filters apply in the order of the fields; 0 / 1.0 / 0.0 = off."""

    temperature: Annotated[float, Field(gt=0, le=100)]
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    tokens_max: Annotated[int, Field(ge=1, le=TOKENS_MAX)]
    stop_ids: Annotated[tuple[TokenId, ...], Field(max_length=16)]


class RunDescriptor(Record):
    """What a run is, signed by the coordinator (label `run`). Names the only key whose manifests are obeyed.

    `rollouts_per_step` is a multiple of `group_size`: a step is made of whole groups, one at least.
    """

    run: Name
    task: Name
    model: Name
    tokenizer_sha256: Digest
    vocabulary_size: Annotated[int, Field(ge=2, le=VOCABULARY_MAX)]
    context_tokens: Annotated[int, Field(ge=8, le=TOKENS_MAX)]
    learner: PeerAddress
    staleness_max: Annotated[int, Field(ge=0, le=1000)]
    publish_period: Annotated[int, Field(ge=1, le=1000)]
    rollouts_per_step: Annotated[int, Field(ge=1, le=1_000_000)]
    group_size: Annotated[int, Field(ge=1, le=SAMPLES_MAX)]
    steps: Count
    sampling: Sampling

    @model_validator(mode="after")
    def _whole_groups(self) -> RunDescriptor:
        if self.rollouts_per_step % self.group_size:
            raise ValueError(f"{self.rollouts_per_step} rollouts are no whole groups of {self.group_size}")
        return self


class Standing(Record):
    """What the coordinator's ledger knows of the run, for the learner: whichever of the two was put back to an older
    state is found out by it.

    `incarnation` is drawn anew at each start of the coordinator: under another one, what it acknowledged before may be
    forgotten. `epoch` is the highest it has ever seen, in a manifest or a report; None before the first.
    `published_epoch`, `published_version` are the newest accepted manifest's. `learner_version` is the last report's.
    """

    incarnation: Annotated[bytes, Field(min_length=16, max_length=16)]
    epoch: Count | None
    published_epoch: Count | None
    published_version: Count | None
    learner_version: Count
    admitted_sequence: Count


class Welcome(Message):
    """Admission granted. `coordinator_time_seconds` is Unix time here: the only clock expiry is judged by.

    `standing` comes with the learner's welcome only.
    """

    TYPE = "welcome"
    wire_version: int
    node_state: Name
    coordinator_time_seconds: float
    heartbeat_seconds: Annotated[float, Field(gt=0, le=3600)]
    descriptor: Signed
    standing: Standing | None = None


# heartbeat: /echo2/heartbeat/1


class Relayed(Record):
    """So many bytes of planned chunks of this snapshot came from `source`, whole and right."""

    manifest_hash: Digest
    source: PeerId
    length_bytes: Annotated[int, Field(ge=1, le=CHUNK_BYTES_MAX * CHUNKS_MAX)]


class Fetching(Record):
    """How far a node's download of a snapshot is, for people to look at: nothing is decided by it.

    The snapshot's chunks are folded into min(chunks, FETCH_CELLS_MAX) cells of nearly equal size: cell i is the chunks
    from floor(i chunks / cells) to below floor((i + 1) chunks / cells). Bit i of `cells` (of byte i // 8, the lowest
    first) is set when all of them are verified and here. `sources` are sending now.
    """

    manifest_hash: Digest
    cells: Annotated[bytes, Field(min_length=1, max_length=FETCH_CELLS_MAX // 8)]
    chunks_held: Annotated[int, Field(ge=0, le=CHUNKS_MAX)]
    sources: Annotated[tuple[PeerId, ...], Field(max_length=FETCH_SOURCES_MAX)] = ()


class HeartbeatBody(Record):
    """Signed by the node (label `heartbeat`). `sequence` rises for the life of the key's session; replays are dropped.

    `hold_seconds`: the coordinator may keep the reply back this long, and answers at once when the pool's version
    differs from (epoch, version) here. So one mechanism is both sign of life and notice of a new snapshot.
    `late`: relays that were to send this node chunks in its last download and did not, as far as it waited.
    `relayed`: who sent it what was planned of its last download. Said again in each heartbeat, counted once.
    `fetching`: the download of the snapshot that is to follow the installed one; nil when there is none.
    """

    run: Name
    session: Annotated[bytes, Field(min_length=16, max_length=16)]
    sequence: Count
    epoch: Count
    version: Count | None
    manifest_hash: Digest | None
    state: Name
    leases_held: Count
    rollouts_generated: Count
    rollouts_spooled: Count
    tokens_per_second: Annotated[float, Field(ge=0, le=1e9)]
    hold_seconds: Seconds
    late: Annotated[tuple[PeerId, ...], Field(max_length=LATE_MAX)] = ()
    relayed: Annotated[tuple[Relayed, ...], Field(max_length=RELAYED_MAX)] = ()
    fetching: Fetching | None = None


class Heartbeat(Message):
    """Node's sign of life."""

    TYPE = "heartbeat"
    BYTES_MAX = 8 * KIB
    body: Signed


class PoolNotice(Record):
    """Signed by the coordinator (label `notice`), bound to one node and heartbeat: no relay can freeze a node.

    `node_reason` says why the node is in its state, `node_expires_seconds` in how many seconds that ends by itself. In
    probation `warmup_returned` of its first `warmup_leases` leases have come back. `warning` is for the node's owner.
    """

    run: Name
    run_state: Name
    peer: PeerId
    session: Annotated[bytes, Field(min_length=16, max_length=16)]
    sequence: Count
    epoch: Count
    version: Count | None
    manifest_hash: Digest | None
    node_state: Name
    coordinator_time_seconds: float
    node_reason: Text = ""
    node_expires_seconds: Seconds | None = None
    warmup_returned: Count = 0
    warmup_leases: Count = 0
    warning: Text = ""


class HeartbeatReply(Message):
    """The coordinator's signed word on which version is current and what it thinks of this node."""

    TYPE = "heartbeat-reply"
    BYTES_MAX = 8 * KIB
    notice: Signed


# manifest: /echo2/manifest/1


class Manifest(Record):
    """One snapshot, described; signed by the learner (label `manifest`). DESIGN section 8.

    The manifest hash is SHA-256 of the signed payload bytes. Order is (epoch, version) per (key, run). Chunk i covers
    bytes [i * chunk_bytes, min((i + 1) * chunk_bytes, length_bytes)).
    """

    run: Name
    publisher: PeerId
    epoch: Count
    version: Count
    kind: Literal["full", "delta", "adapter"]
    base_hash: Digest | None
    anchor_hash: Digest | None
    codec: Literal["raw", "zstd"]
    domain: Literal["f32", "f16", "bf16", "q8_0"]
    length_bytes: Annotated[int, Field(ge=1, le=CHUNK_BYTES_MAX * CHUNKS_MAX)]
    chunk_bytes: Annotated[int, Field(ge=KIB, le=CHUNK_BYTES_MAX)]
    chunk_sha256: Annotated[bytes, Field(min_length=32, max_length=32 * CHUNKS_MAX)]
    snapshot_sha256: Digest
    previous_hash: Digest | None
    created_seconds: float
    expires_seconds: float


class PlanEdge(Record):
    """One source of one node: chunks first, first + stride, ... below stop come from `source`."""

    source: PeerId
    first: Count
    stop: Count
    stride: Annotated[int, Field(ge=1, le=CHUNKS_MAX)] = 1


class PlanEntry(Record):
    """A node of the roster and where its chunks come from. The edges cover every chunk exactly once."""

    node: PeerAddress
    edges: Annotated[tuple[PlanEdge, ...], Field(max_length=256)]


class BroadcastPlan(Record):
    """Who sends what to whom, signed by the coordinator (label `plan`). The entries are the roster."""

    run: Name
    manifest_hash: Digest
    epoch: Count
    version: Count
    chunks: Annotated[int, Field(ge=1, le=CHUNKS_MAX)]
    kind: Literal["star", "chain"]
    root: PeerAddress
    entries: Annotated[tuple[PlanEntry, ...], Field(max_length=NODES_MAX)]


class Ticket(Record):
    """One roster line, signed by the coordinator (label `ticket`): `peer` may be served this snapshot's chunks.

    Shown with every chunk request, so that a holder needs no roster of its own to know whom it serves.
    """

    run: Name
    manifest_hash: Digest
    peer: PeerId


class ManifestRequest(Message):
    """A node asks the coordinator for the snapshot it was told of."""

    TYPE = "manifest-request"
    run: Name
    manifest_hash: Digest


class ManifestReply(Message):
    """The learner's manifest, the plan as it is now, and the asker's ticket."""

    TYPE = "manifest-reply"
    BYTES_MAX = 32 * MIB
    manifest: Signed
    plan: Signed
    ticket: Signed


# chunks: /echo2/chunks/1


class ChunkRequest(Message):
    """Asks a holder for chunks first, first + stride, ... below stop, less those in `have`, each as soon as it has it.

    `have` is a bitmap over the request's own sequence of chunks (bit k of byte k // 8 = the k-th of them).
    `wait_seconds`: how long the holder may wait for a chunk still to come; 0 asks only for what is there now.
    """

    TYPE = "chunk-request"
    BYTES_MAX = 64 * KIB
    run: Name
    manifest_hash: Digest
    ticket: Signed
    first: Count
    stop: Count
    stride: Annotated[int, Field(ge=1, le=CHUNKS_MAX)] = 1
    have: Annotated[bytes, Field(max_length=CHUNKS_MAX // 8)] = b""
    wait_seconds: Seconds = 0.0


class Chunk(Message):
    """One chunk's bytes. Checked against the manifest before it is stored or forwarded."""

    TYPE = "chunk"
    BYTES_MAX = CHUNK_BYTES_MAX + KIB
    index: Count
    data: Annotated[bytes, Field(min_length=1, max_length=CHUNK_BYTES_MAX)]


# leases: /echo2/leases/1


class LeaseRequest(Message):
    """A node with room asks for up to `samples_max` samples under the snapshot it has installed.

    The reply may be kept back up to `wait_seconds` until there is work.
    """

    TYPE = "lease-request"
    run: Name
    manifest_hash: Digest
    samples_max: Annotated[int, Field(ge=1, le=SLICES_MAX * SAMPLES_MAX)]
    wait_seconds: Seconds


class Sandboxed(Record):
    """What an episode of several turns needs beside its lease (DESIGN section 9). The environment's seed is
    BLAKE2b-256("env", key = the lease's seed); `prompt_tokens` is its first observation, wrapped as any prompt.

    A later observation is put in as turn_prefix_tokens, its text in tokens, turn_suffix_tokens. A turn has at most
    `turn_tokens_max` tokens; the sampling's `tokens_max` counts everything behind the prompt, inserted tokens too.
    """

    task: Name
    options_json: Annotated[str, Field(max_length=4096)] = "{}"
    turns_max: Annotated[int, Field(ge=1, le=TURNS_MAX)]
    turn_tokens_max: Annotated[int, Field(ge=1, le=TOKENS_MAX)]
    turn_prefix_tokens: TokenBytes = b""
    turn_suffix_tokens: TokenBytes = b""


class Lease(Record):
    """The order to generate one slice: samples sample_first .. sample_first + sample_count - 1 of one prompt.

    u_t of a sample is BLAKE2b(key = seed, le64(sample) || le64(t)): given the seed the response is determined, up to
    numerics. Slices are all or nothing.
    """

    lease_id: LeaseId
    kind: Literal["train", "eval"]
    ordinal: Count
    sample_first: Annotated[int, Field(ge=0, lt=SAMPLES_MAX)]
    sample_count: Annotated[int, Field(ge=1, le=SAMPLES_MAX)]
    seed: Digest
    manifest_hash: Digest
    version: Count
    prompt_tokens: TokenBytes
    sampling: Sampling
    duration_seconds: Seconds
    sandbox: Sandboxed | None = None


class LeaseReply(Message):
    """Leases granted; when none, `reason` says why and `retry_seconds` when to ask again."""

    TYPE = "lease-reply"
    BYTES_MAX = 8 * MIB
    leases: Annotated[tuple[Lease, ...], Field(max_length=SLICES_MAX)]
    retry_seconds: Seconds
    reason: Text


# tokenizer: /echo2/tokenizer/1


class TokenizerRequest(Message):
    """A node of a multi-turn run asks for a piece of the model's `tokenizer.json`, from byte `offset` on."""

    TYPE = "tokenizer-request"
    run: Name
    offset: Annotated[int, Field(ge=0, le=TOKENIZER_BYTES_MAX)]


class TokenizerReply(Message):
    """The piece, the length of the whole, and the model's card as JSON. The whole hashes to the descriptor's digest."""

    TYPE = "tokenizer-reply"
    BYTES_MAX = TOKENIZER_PIECE_BYTES + 128 * KIB
    length_bytes: Annotated[int, Field(ge=1, le=TOKENIZER_BYTES_MAX)]
    data: Annotated[bytes, Field(max_length=TOKENIZER_PIECE_BYTES)]
    card: Annotated[str, Field(max_length=64 * KIB)]


# rollouts: /echo2/rollouts/1


class RolloutRecord(Record):
    """One sample: tokens drawn (the terminal one included), log softmax(logits / T) of each, why it ended.

    Of several turns: everything behind the prompt. `spans` are lengths, alternately of what was drawn and of what was
    inserted, the first and the last drawn; () means that all of it was drawn. An inserted token's log-probability is 0.
    `reward` is what the node's own sandbox said.
    """

    sample: Annotated[int, Field(ge=0, lt=SAMPLES_MAX)]
    tokens: TokenBytes
    logprobs: TokenBytes
    finish: Literal["stop", "length"]
    spans: Spans = ()
    reward: Annotated[float, Field(ge=-1e9, le=1e9)] | None = None


class Slice(Record):
    """All samples of one lease, in order."""

    lease_id: LeaseId
    manifest_hash: Digest
    rollouts: Annotated[tuple[RolloutRecord, ...], Field(min_length=1, max_length=SAMPLES_MAX)]


class SubmitRequest(Message):
    """Finished slices. Sending again is safe: (run, lease, sample) is unique."""

    TYPE = "submit"
    BYTES_MAX = 16 * MIB
    run: Name
    slices: Annotated[tuple[Slice, ...], Field(min_length=1, max_length=SLICES_MAX)]


class SliceAck(Record):
    """This slice is durable here (whatever its state becomes), so the node may forget it."""

    lease_id: LeaseId
    state: Name
    reason: Text


class SubmitReply(Message):
    """One acknowledgement a slice, in the order sent."""

    TYPE = "submit-reply"
    BYTES_MAX = 256 * KIB
    acks: Annotated[tuple[SliceAck, ...], Field(max_length=SLICES_MAX)]


# receipts: /echo2/receipts/1


class Receipt(Record):
    """The terminal state of one rollout. `sequence` rises by one per node."""

    sequence: Count
    lease_id: LeaseId
    sample: Annotated[int, Field(ge=0, lt=SAMPLES_MAX)]
    state: Literal["consumed", "stale", "withdrawn", "rejected", "duplicate", "evaluated"]
    reason: Text
    reward: Annotated[float, Field(ge=-1e9, le=1e9)] | None


class ReceiptBatch(Record):
    """Signed by the coordinator (label `receipts`); a node keeps the bytes and can verify them offline."""

    run: Name
    peer: PeerId
    receipts: Annotated[tuple[Receipt, ...], Field(max_length=512)]


class ReceiptsRequest(Message):
    """A node asks for its receipts after `after_sequence` (0 = from the first)."""

    TYPE = "receipts-request"
    run: Name
    after_sequence: Count


class ReceiptsReply(Message):
    """Up to 512 receipts in order; `more` when there are others behind them."""

    TYPE = "receipts-reply"
    BYTES_MAX = MIB
    batch: Signed
    more: bool


# statement: /echo2/statement/1


class StatementRequest(Message):
    """A node asks for its postings behind posting `after` (0 = from the first), over all runs of this coordinator."""

    TYPE = "statement-request"
    run: Name
    after: Count


class StatementReply(Message):
    """A page of them (`postings.Statement`, label `statement`); `more` when there are others behind it."""

    TYPE = "statement-reply"
    BYTES_MAX = 2 * MIB
    statement: Signed
    more: bool


# appeal: /echo2/appeal/1


class AppealRequest(Message):
    """A node's owner does not agree. Sending again, with the same id, is safe and tells what became of it.

    `subject`: a lease in hexadecimal digits, or `suspension`.
    """

    TYPE = "appeal"
    run: Name
    appeal_id: LeaseId
    subject: Annotated[str, Field(pattern=r"^([0-9a-f]{32}|suspension)$")]
    text: Annotated[str, Field(min_length=1, max_length=APPEAL_CHARS_MAX)]


class AppealReply(Message):
    """It is on record. `answer` is the operator's, `posting` the number of the adjustment that came of it, if any."""

    TYPE = "appeal-reply"
    appeal_id: LeaseId
    state: Literal["open", "upheld", "refused"]
    answer: Text
    posting: Count | None = None


# learner: /echo2/admitted/1, /echo2/report/1, /echo2/publish/1


class AdmittedRequest(Message):
    """The learner asks for admitted, not yet finished rollouts after `after_sequence`, waiting up to `wait_seconds`.

    After a restart it asks from 0 and leaves out what its checkpoint already consumed.
    """

    TYPE = "admitted-request"
    run: Name
    after_sequence: Count
    rollouts_max: Annotated[int, Field(ge=1, le=4096)]
    wait_seconds: Seconds


class Detail(Record):
    """One measure of an episode beside its reward: chips by opponent, actions that could not be read."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    value: Annotated[float, Field(ge=-1e9, le=1e9)]


class AdmittedRollout(Record):
    """A checked and scored rollout: tau = (prompt, response, reward, version, metadata); `spans` as in a record."""

    sequence: Count
    lease_id: LeaseId
    ordinal: Count
    sample: Annotated[int, Field(ge=0, lt=SAMPLES_MAX)]
    peer: PeerId
    version: Count
    prompt_tokens: TokenBytes
    tokens: TokenBytes
    logprobs: TokenBytes
    finish: Literal["stop", "length"]
    temperature: Annotated[float, Field(gt=0, le=100)]
    reward: Annotated[float, Field(ge=-1e9, le=1e9)]
    spans: Spans = ()
    details: Annotated[tuple[Detail, ...], Field(max_length=DETAILS_MAX)] = ()


class RolloutKey(Record):
    """Names one rollout of a run for good."""

    lease_id: LeaseId
    sample: Annotated[int, Field(ge=0, lt=SAMPLES_MAX)]


class AdmittedReply(Message):
    """Rollouts in order of sequence, and those to withdraw unless already consumed (their node was suspended)."""

    TYPE = "admitted-reply"
    BYTES_MAX = 32 * MIB
    run_state: Name
    rollouts: Annotated[tuple[AdmittedRollout, ...], Field(max_length=4096)]
    withdraw: Annotated[tuple[RolloutKey, ...], Field(max_length=4096)]


class Finished(Record):
    """The learner's word on one rollout's terminal state. `step` is the training step that decided it."""

    lease_id: LeaseId
    sample: Annotated[int, Field(ge=0, lt=SAMPLES_MAX)]
    state: Literal["consumed", "stale", "withdrawn"]
    step: Count
    reason: Text


class NodeMismatch(Record):
    """k3 KL of one node's sampler to the learner, the mean over its tokens of one step."""

    peer: PeerId
    kl: Annotated[float, Field(ge=0)]
    tokens: Count


class DropCount(Record):
    """Rollouts dropped since the step before: for one reason, of up to `tokens_max` tokens (a power of two)."""

    reason: Text
    tokens_max: Count
    count: Count


class Culprit(Record):
    """A rollout whose numbers stopped an optimiser update."""

    lease_id: LeaseId
    sample: Annotated[int, Field(ge=0, lt=SAMPLES_MAX)]
    peer: PeerId
    reason: Text


class StepMetrics(Record):
    """What one training step was. Step t turns version t into t + 1; `staleness` is t - oldest version in the batch.

    `ratio_*` and `truncated_share` are of pi_learner,old / pi_sampler: the mean after truncation at C, the largest
    before. `clip_*` are of pi_theta / pi_learner,old. Those with a default are younger than the rest.
    """

    step: Count
    rollouts: Count
    groups: Count
    groups_without_spread: Count
    staleness: Count
    staleness_mean: Annotated[float, Field(ge=0)]
    reward_mean: float
    loss: float
    ratio_mean: float
    clip_share: Annotated[float, Field(ge=0, le=1)]
    kl_sampler_learner: float
    entropy: float
    response_tokens_mean: Annotated[float, Field(ge=0)]
    gradient_norm: float
    train_seconds: Seconds
    idle_seconds: Seconds
    reward_std: Annotated[float, Field(ge=0)] = 0.0
    ratio_max: Annotated[float, Field(ge=0)] = 0.0
    truncated_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    clip_share_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    clip_share_high: Annotated[float, Field(ge=0, le=1)] = 0.0
    kl_reference: float | None = None
    kl_by_node: Annotated[tuple[NodeMismatch, ...], Field(max_length=STEP_NODES_MAX)] = ()
    staleness_counts: Annotated[tuple[Count, ...], Field(max_length=STALENESS_BINS)] = ()
    drops: Annotated[tuple[DropCount, ...], Field(max_length=STEP_DROPS_MAX)] = ()
    response_tokens_max: Count = 0
    updates: Count = 0
    updates_skipped: Annotated[tuple[Text, ...], Field(max_length=64)] = ()
    culprits: Annotated[tuple[Culprit, ...], Field(max_length=CULPRITS_MAX)] = ()


class LearnerReport(Message):
    """Consumption is reported only once a checkpoint that covers it is durable; drops are reported at once.

    The first report of an epoch comes before anything is asked or published under it, and its `version` is the one the
    learner goes on from. `consumed`: rollouts that the learner's line of checkpoints has consumed, as far as they are
    reported, here included. `groups_before`: of every group below this ordinal something was consumed.
    """

    TYPE = "learner-report"
    BYTES_MAX = 8 * MIB
    run: Name
    epoch: Count
    version: Count
    finished: Annotated[tuple[Finished, ...], Field(max_length=65_536)]
    steps: Annotated[tuple[StepMetrics, ...], Field(max_length=1024)]
    status: Text
    consumed: Count | None = None
    groups_before: Count | None = None


class PublishRequest(Message):
    """A new snapshot. Sent only when the checkpoint it came from is durable.

    With an adapter comes the manifest of its base, in the bytes it was published in: the ledger may be older than it.
    """

    TYPE = "publish"
    BYTES_MAX = 16 * MIB
    manifest: Signed
    base: Signed | None = None


class PublishReply(Message):
    """The plan the coordinator made for it."""

    TYPE = "publish-reply"
    BYTES_MAX = 16 * MIB
    plan: Signed
