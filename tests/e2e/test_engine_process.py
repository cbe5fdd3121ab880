"""The engine process for real: kills, hangs, broken files, and what it may know of its surroundings."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys

import pytest
import trio

from echo2.node.engine import EngineFailed, EngineOptions, SliceOrder, SnapshotRefused
from echo2.node.process_engine import FAILURES_MAX, ProcessEngine, scrubbed
from echo2.p2p.codec import pack_tokens, unpack_logprobs, unpack_tokens
from echo2.p2p.messages import Sampling

pytestmark = pytest.mark.e2e


def order(seed: int, count: int = 4, tokens_max: int = 6, **filters) -> SliceOrder:
    sampling = Sampling(temperature=filters.pop("temperature", 1.0), **filters, tokens_max=tokens_max, stop_ids=(2,))
    return SliceOrder(bytes([seed]) * 32, 0, count, pack_tokens([5, 6, 7]), sampling)


@pytest.fixture
async def engine():
    engine = ProcessEngine(EngineOptions(), backoff_seconds=0.01)
    yield engine
    await engine.close()


async def test_a_child_killed_in_the_middle_is_replaced_and_the_orders_run_again(engine, random_ggufs):
    """kill -9 costs time only: the same orders give the same rollouts, from a new process."""
    await engine.load(*random_ggufs[0])
    orders = [order(seed, count=64, tokens_max=50, temperature=3.0) for seed in range(8)]
    calm = await engine.generate(orders)
    first = engine.pid
    results = []

    async def generate():
        results.extend(await engine.generate(orders))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(generate)
            await trio.sleep(0.1)  # by then it is inside the batch, which takes longer
            os.kill(first, signal.SIGKILL)
    assert results == calm
    assert engine.pid != first
    assert engine.restarts == 1
    assert engine.last_error == "the engine process was killed by signal 9"


async def test_a_hang_is_a_failure(random_ggufs):
    """A stopped child answers nothing; after the time-out it is killed and replaced."""
    engine = ProcessEngine(EngineOptions(), generate_seconds=0.5, backoff_seconds=0.01)
    await engine.load(*random_ggufs[0])
    os.kill(engine.pid, signal.SIGSTOP)
    with trio.fail_after(30):
        assert len(await engine.generate([order(1)])) == 1
    assert engine.restarts == 1
    await engine.close()


async def test_a_hang_is_seen_soon_once_the_speed_is_known(random_ggufs):
    """A batch may take some multiple of what the one before took, not the quarter of an hour of an unknown machine."""
    engine = ProcessEngine(EngineOptions(), patience_seconds=0.5, backoff_seconds=0.01)
    await engine.load(*random_ggufs[0])
    await engine.generate([order(1)])
    os.kill(engine.pid, signal.SIGSTOP)
    with trio.fail_after(60):
        assert len(await engine.generate([order(1)])) == 1
    assert engine.restarts >= 1
    assert "did not answer for" in engine.last_error
    await engine.close()


async def test_failures_in_a_row_end_with_the_reason():
    """A child that always dies is not restarted for ever."""
    engine = ProcessEngine(
        EngineOptions(), command=[sys.executable, "-c", "raise SystemExit(7)"], backoff_seconds=0.001
    )
    with pytest.raises(EngineFailed, match=rf"{FAILURES_MAX} times in a row.*ended \(7\)"), trio.fail_after(30):
        await engine.load(__file__, bytes(32))


async def test_an_illegal_instruction_is_met_once(random_ggufs):
    """A virtual machine may claim instructions it does not allow: the next start does without them."""
    child = (
        "import json, os, signal, sys\n"
        "if not json.loads(sys.argv[1])['plain_kernels']: os.kill(os.getpid(), signal.SIGILL)\n"
        "os.execv(sys.executable, [sys.executable, '-P', '-m', 'echo2.node.engine_process', sys.argv[1]])\n"
    )
    engine = ProcessEngine(EngineOptions(), command=[sys.executable, "-c", child], backoff_seconds=0.01)
    await engine.load(*random_ggufs[0])
    assert len(await engine.generate([order(1)])) == 1
    assert engine.restarts == 1
    assert "instruction that is not allowed here" in engine.last_error
    await engine.close()


async def test_a_cancelled_batch_leaves_no_stale_reply(engine, random_ggufs):
    """After a cancelled call the next one gets its own answer."""
    await engine.load(*random_ggufs[0])
    expected = await engine.generate([order(1)])
    with trio.move_on_after(0.05):
        await engine.generate([order(seed, count=64, tokens_max=50, temperature=3.0) for seed in range(64)])
    assert await engine.generate([order(1)]) == expected


async def test_two_snapshots_are_two_policies(engine, random_ggufs):
    """Loading another file changes the rollouts; loading the first again brings them back."""
    await engine.load(*random_ggufs[0])
    first = await engine.generate([order(1)])
    await engine.load(*random_ggufs[1])
    assert await engine.generate([order(1)]) != first
    await engine.load(*random_ggufs[0])
    assert await engine.generate([order(1)]) == first


async def test_bytes_that_are_not_the_manifests_are_never_parsed(engine, random_ggufs):
    """The child hashes the file right before it opens it."""
    path, _ = random_ggufs[0]
    with pytest.raises(SnapshotRefused, match="changed on disk"):
        await engine.load(path, bytes(32))


async def test_garbage_with_the_right_hash_is_refused(engine, tmp_path):
    """A file that is no model is declined by llama.cpp in the child; the parent lives."""
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"GGUF" + os.urandom(4096))
    with pytest.raises((SnapshotRefused, EngineFailed)):
        await engine.load(path, hashlib.sha256(path.read_bytes()).digest())


async def test_log_probabilities_agree_whatever_the_batch(random_ggufs):
    """One sequence at a time or many together: the same tokens, log-probabilities as near as a float16 cache allows."""
    orders = [order(seed, count=8, tokens_max=12) for seed in range(12)]
    results = []
    for sequences in (1, 7, 256):
        engine = ProcessEngine(EngineOptions(sequences=sequences))
        await engine.load(*random_ggufs[0])
        results.append(await engine.generate(orders))
        await engine.close()
    rollouts = [[r for s in result for r in s.rollouts] for result in results]
    for other in rollouts[1:]:
        same = [a.tokens == b.tokens for a, b in zip(rollouts[0], other, strict=True)]
        assert sum(same) >= len(same) - 1  # u on a boundary may fall either way
        for a, b in zip(rollouts[0], other, strict=True):
            if a.tokens == b.tokens:
                assert abs(unpack_logprobs(a.logprobs) - unpack_logprobs(b.logprobs)).max() < 5e-3


async def test_mixed_sampling_in_one_batch(engine, random_ggufs):
    """Slices with other parameters share a batch and keep their own rules."""
    await engine.load(*random_ggufs[0])
    alone = [(await engine.generate([o]))[0] for o in (order(1), order(1, top_k=1), order(1, temperature=0.5))]
    together = await engine.generate([order(1), order(1, top_k=1), order(1, temperature=0.5)])
    assert [[r.tokens for r in s.rollouts] for s in together] == [[r.tokens for r in s.rollouts] for s in alone]
    greedy = {tuple(unpack_tokens(r.tokens)) for r in alone[1].rollouts}
    assert len(greedy) == 1


def test_the_child_ends_when_its_stdin_closes():
    """So a parent that is killed takes its engine with it."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "echo2.node.engine_process", "{}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout.read(4)
    child.stdin.close()
    assert child.wait(timeout=10) == 0
    child.stdout.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only a running child sees that its parent is gone")
def test_a_stopped_child_goes_with_its_killed_parent():
    """A frozen engine cannot see its stdin close; the system ends it with the node (and not with a thread of it)."""
    program = (
        "import os, signal, sys, trio\n"
        "from echo2.node.engine import EngineOptions\n"
        "from echo2.node.process_engine import ProcessEngine\n"
        "async def main():\n"
        "    engine = ProcessEngine(EngineOptions())\n"
        "    await engine._start()\n"
        "    os.kill(engine.pid, signal.SIGSTOP)\n"
        "    print(engine.pid, flush=True)\n"
        "    await trio.sleep_forever()\n"
        "trio.run(main)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    assert not select.select([watch], [], [], 0.2)[0]  # it lives on while its parent does
    parent.kill()
    parent.wait()
    assert select.select([watch], [], [], 20)[0]
    os.close(watch)
    parent.stdout.close()


def test_the_child_knows_no_secrets():
    """The environment passes on what libraries and GPUs need, nothing else."""
    given = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_TOKEN": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "ECHO2_KEY": "",
    }
    assert scrubbed(given) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
