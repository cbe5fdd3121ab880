"""One example of every message and signed record, with values easy to find in a hexdump."""

from __future__ import annotations

from echo2.p2p.codec import pack_logprobs, pack_tokens
from echo2.p2p.identity import Identity
from echo2.p2p.messages import (
    Ack,
    AdmittedReply,
    AdmittedRequest,
    AdmittedRollout,
    BroadcastPlan,
    Chunk,
    ChunkRequest,
    Culprit,
    Detail,
    DropCount,
    Fetching,
    Finished,
    Heartbeat,
    HeartbeatBody,
    HeartbeatReply,
    Hello,
    LearnerReport,
    Lease,
    LeaseReply,
    LeaseRequest,
    Manifest,
    ManifestReply,
    ManifestRequest,
    NodeMismatch,
    PeerAddress,
    PlanEdge,
    PlanEntry,
    PoolNotice,
    PublishReply,
    PublishRequest,
    Receipt,
    ReceiptBatch,
    ReceiptsReply,
    ReceiptsRequest,
    Refusal,
    RolloutKey,
    RolloutRecord,
    RunDescriptor,
    Sampling,
    Sandboxed,
    Slice,
    SliceAck,
    Standing,
    StepMetrics,
    SubmitReply,
    SubmitRequest,
    Ticket,
    TokenizerReply,
    TokenizerRequest,
    Welcome,
)
from echo2.p2p.reachability import DialBackReply, DialBackRequest

SIGNER = Identity(bytes(range(32)))
NODE = Identity(b"\x4e" * 32)
"""0x4e is N."""

RUN = "sums-1"
LEASE = bytes.fromhex("1ea5e0000000000000000000000000ff")
SESSION = bytes.fromhex("5e5510000000000000000000000000ff")
HASH = bytes.fromhex("aa" * 32)
TOKENS = pack_tokens([3, 1, 14])
LOGPROBS = pack_logprobs([-0.5, -0.25, 0.0])
SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, tokens_max=8, stop_ids=(2,))
LEARNER = PeerAddress(peer=SIGNER.peer_id, addresses=("/ip4/192.0.2.1/tcp/4001",))

MANIFEST = Manifest(
    run=RUN,
    publisher=SIGNER.peer_id,
    epoch=1,
    version=2,
    kind="full",
    base_hash=None,
    anchor_hash=None,
    codec="raw",
    domain="f16",
    length_bytes=65_537,
    chunk_bytes=65_536,
    chunk_sha256=bytes.fromhex("c0" * 32 + "c1" * 32),
    snapshot_sha256=HASH,
    previous_hash=None,
    created_seconds=1_700_000_000.0,
    expires_seconds=1_700_003_600.0,
)
DESCRIPTOR = RunDescriptor(
    run=RUN,
    task="sums",
    model="tiny",
    tokenizer_sha256=HASH,
    vocabulary_size=15,
    context_tokens=32,
    learner=LEARNER,
    staleness_max=3,
    publish_period=2,
    rollouts_per_step=256,
    group_size=8,
    steps=50,
    sampling=SAMPLING,
)
HEARTBEAT = HeartbeatBody(
    run=RUN,
    session=SESSION,
    sequence=7,
    epoch=1,
    version=2,
    manifest_hash=HASH,
    state="generating",
    leases_held=1,
    rollouts_generated=64,
    rollouts_spooled=8,
    tokens_per_second=310.5,
    hold_seconds=10.0,
    late=(SIGNER.peer_id,),
    fetching=Fetching(manifest_hash=HASH, cells=b"\x05", chunks_held=2, sources=(SIGNER.peer_id,)),
)
NOTICE = PoolNotice(
    run=RUN,
    run_state="running",
    peer=NODE.peer_id,
    session=SESSION,
    sequence=7,
    epoch=1,
    version=None,
    manifest_hash=None,
    node_state="active",
    coordinator_time_seconds=1_700_000_000.5,
)
PLAN = BroadcastPlan(
    run=RUN,
    manifest_hash=HASH,
    epoch=1,
    version=2,
    chunks=2,
    kind="chain",
    root=LEARNER,
    entries=(
        PlanEntry(
            node=PeerAddress(peer=NODE.peer_id),
            edges=(PlanEdge(source=SIGNER.peer_id, first=0, stop=2, stride=1),),
        ),
    ),
)
TICKET = Ticket(run=RUN, manifest_hash=HASH, peer=NODE.peer_id)
RECEIPTS = ReceiptBatch(
    run=RUN,
    peer=NODE.peer_id,
    receipts=(
        Receipt(sequence=1, lease_id=LEASE, sample=0, state="consumed", reason="", reward=1.0),
        Receipt(sequence=2, lease_id=LEASE, sample=1, state="rejected", reason="termination", reward=None),
    ),
)

SIGNED = [
    ("manifest", MANIFEST),
    ("run", DESCRIPTOR),
    ("heartbeat", HEARTBEAT),
    ("notice", NOTICE),
    ("plan", PLAN),
    ("ticket", TICKET),
    ("receipts", RECEIPTS),
]
"""(label, record): every record that is ever signed."""

_ROLLOUT = RolloutRecord(sample=0, tokens=TOKENS, logprobs=LOGPROBS, finish="stop", spans=(1, 1, 1), reward=-0.08)

MESSAGES = [
    Refusal(code="token-unknown", detail="ask the operator for a join string", retry_seconds=None),
    Ack(count=3),
    Hello(
        wire_versions=(1,),
        software="echo2 0.1.0",
        role="node",
        name="kitchen",
        token="s3cret",
        addresses=("/ip4/192.0.2.7/tcp/4001",),
    ),
    Welcome(
        wire_version=1,
        node_state="probation",
        coordinator_time_seconds=1_700_000_000.0,
        heartbeat_seconds=10.0,
        descriptor=SIGNER.sign("run", DESCRIPTOR),
        standing=Standing(
            incarnation=SESSION,
            epoch=2,
            published_epoch=1,
            published_version=4,
            learner_version=5,
            admitted_sequence=640,
        ),
    ),
    Heartbeat(body=NODE.sign("heartbeat", HEARTBEAT)),
    HeartbeatReply(notice=SIGNER.sign("notice", NOTICE)),
    ManifestRequest(run=RUN, manifest_hash=HASH),
    ManifestReply(
        manifest=SIGNER.sign("manifest", MANIFEST),
        plan=SIGNER.sign("plan", PLAN),
        ticket=SIGNER.sign("ticket", TICKET),
    ),
    ChunkRequest(
        run=RUN,
        manifest_hash=HASH,
        ticket=SIGNER.sign("ticket", TICKET),
        first=0,
        stop=2,
        stride=1,
        have=b"\x01",
    ),
    Chunk(index=1, data=b"GGUF"),
    LeaseRequest(run=RUN, manifest_hash=HASH, samples_max=16, wait_seconds=5.0),
    LeaseReply(
        leases=(
            Lease(
                lease_id=LEASE,
                kind="train",
                ordinal=5,
                sample_first=4,
                sample_count=2,
                seed=bytes.fromhex("5e" * 32),
                manifest_hash=HASH,
                version=2,
                prompt_tokens=TOKENS,
                sampling=SAMPLING,
                duration_seconds=60.0,
                sandbox=Sandboxed(
                    task="poker",
                    options_json='{"opponents":["rock"]}',
                    turns_max=16,
                    turn_tokens_max=24,
                    turn_prefix_tokens=pack_tokens([5, 6]),
                    turn_suffix_tokens=pack_tokens([7]),
                ),
            ),
        ),
        retry_seconds=0.0,
        reason="",
    ),
    TokenizerRequest(run=RUN, offset=1_048_576),
    TokenizerReply(length_bytes=1_048_580, data=b"}}}}", card='{"name": "tiny"}'),
    SubmitRequest(run=RUN, slices=(Slice(lease_id=LEASE, manifest_hash=HASH, rollouts=(_ROLLOUT,)),)),
    SubmitReply(acks=(SliceAck(lease_id=LEASE, state="held", reason=""),)),
    ReceiptsRequest(run=RUN, after_sequence=0),
    ReceiptsReply(batch=SIGNER.sign("receipts", RECEIPTS), more=False),
    AdmittedRequest(run=RUN, after_sequence=0, rollouts_max=256, wait_seconds=5.0),
    AdmittedReply(
        run_state="running",
        rollouts=(
            AdmittedRollout(
                sequence=9,
                lease_id=LEASE,
                ordinal=5,
                sample=4,
                peer=NODE.peer_id,
                version=2,
                prompt_tokens=TOKENS,
                tokens=TOKENS,
                logprobs=LOGPROBS,
                finish="stop",
                temperature=1.0,
                reward=1.0,
                spans=(1, 1, 1),
                details=(Detail(name="chips_rock", value=-8.0),),
            ),
        ),
        withdraw=(RolloutKey(lease_id=LEASE, sample=5),),
    ),
    LearnerReport(
        run=RUN,
        epoch=1,
        version=3,
        finished=(Finished(lease_id=LEASE, sample=4, state="consumed", step=2, reason=""),),
        steps=(
            StepMetrics(
                step=2,
                rollouts=256,
                groups=32,
                groups_without_spread=4,
                staleness=1,
                staleness_mean=0.5,
                reward_mean=0.75,
                loss=-0.125,
                ratio_mean=1.0,
                clip_share=0.0,
                kl_sampler_learner=0.001,
                entropy=0.5,
                response_tokens_mean=3.0,
                gradient_norm=0.25,
                train_seconds=0.5,
                idle_seconds=0.0,
                reward_std=0.5,
                ratio_max=2.5,
                truncated_share=0.125,
                clip_share_low=0.0,
                clip_share_high=0.0,
                kl_reference=0.25,
                kl_by_node=(NodeMismatch(peer=NODE.peer_id, kl=0.001, tokens=768),),
                staleness_counts=(128, 128),
                drops=(DropCount(reason="late", tokens_max=64, count=2),),
                response_tokens_max=8,
                updates=1,
                updates_skipped=("a ratio has exploded or is not finite",),
                culprits=(Culprit(lease_id=LEASE, sample=4, peer=NODE.peer_id, reason="its advantage is not finite"),),
            ),
        ),
        status="training",
        consumed=512,
        groups_before=64,
    ),
    PublishRequest(manifest=SIGNER.sign("manifest", MANIFEST)),
    PublishReply(plan=SIGNER.sign("plan", PLAN)),
    DialBackRequest(ports=(4001,)),
    DialBackReply(observed="/ip4/192.0.2.7/tcp/50123", ports=(4001,)),
]
"""One of every message type."""
