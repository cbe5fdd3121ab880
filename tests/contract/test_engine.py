"""One contract, two engines: the real one (llama.cpp in a process) and the fake one that simulations run on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from conftest import sha256_of

from echo2.node.engine import AdapterFile, EngineError, EngineOptions, OrderRefused, SliceOrder, SnapshotRefused
from echo2.node.fake_engine import FakeEngine
from echo2.node.process_engine import ProcessEngine
from echo2.p2p.codec import pack_tokens, unpack_logprobs, unpack_tokens
from echo2.p2p.messages import Sampling

STOP = 2
CONTEXT = 64


@pytest.fixture(params=["fake", "process"])
async def engine(request):
    engine = FakeEngine(sequence_tokens_max=CONTEXT) if request.param == "fake" else ProcessEngine(EngineOptions())
    yield engine
    await engine.close()


def order(seed: int, first: int = 0, count: int = 4, prompt=(5, 6, 7), tokens_max: int = 6) -> SliceOrder:
    sampling = Sampling(temperature=1.0, tokens_max=tokens_max, stop_ids=(STOP,))
    return SliceOrder(bytes([seed]) * 32, first, count, pack_tokens(prompt), sampling)


async def test_an_engine_keeps_the_contract(engine, random_ggufs):
    """Orders give one result each, in order, with the samples asked, bounded, ended rightly, and the same again."""
    (path, sha256), _ = random_ggufs
    with pytest.raises(EngineError, match="no snapshot"):
        await engine.generate([order(1)])
    await engine.load(path, sha256)

    orders = [order(1), order(2, first=3, count=2), order(3, tokens_max=1), order(4, prompt=[5] * 40)]
    results = await engine.generate(orders)
    assert len(results) == len(orders)
    for result, asked in zip(results, orders, strict=True):
        samples = [rollout.sample for rollout in result.rollouts]
        assert samples == list(range(asked.sample_first, asked.sample_first + asked.sample_count))
        for rollout in result.rollouts:
            tokens, logprobs = unpack_tokens(rollout.tokens), unpack_logprobs(rollout.logprobs)
            assert 1 <= len(tokens) == len(logprobs) <= asked.sampling.tokens_max
            assert (logprobs <= 0).all()
            assert STOP not in tokens[:-1]
            assert rollout.finish == ("stop" if tokens[-1] == STOP else "length")
            assert rollout.finish == "stop" or len(tokens) == asked.sampling.tokens_max
    again = await engine.generate(orders)
    assert [[r.tokens for r in x.rollouts] for x in again] == [[r.tokens for r in x.rollouts] for x in results]


async def test_samples_do_not_depend_on_their_slice(engine, random_ggufs):
    """Cutting a group into other slices gives the same rollouts: the seed and the sample number say it all."""
    (path, sha256), _ = random_ggufs
    await engine.load(path, sha256)
    (whole,) = await engine.generate([order(1, 0, 4)])
    parts = await engine.generate([order(1, 0, 1), order(9), order(1, 1, 3)])
    assert [r.tokens for r in whole.rollouts] == [r.tokens for p in (parts[0], parts[2]) for r in p.rollouts]


async def test_an_order_that_does_not_fit_is_refused_whole(engine, random_ggufs):
    """A context overflow is never a rollout; the engine goes on with the next call."""
    (path, sha256), _ = random_ggufs
    await engine.load(path, sha256)
    with pytest.raises(OrderRefused):
        await engine.generate([order(1), order(2, prompt=[5] * 60, tokens_max=10)])
    assert len(await engine.generate([order(1)])) == 1


async def test_a_snapshot_that_cannot_be_loaded_leaves_the_old_one_in_use(engine, random_ggufs, tmp_path):
    """Refused, with a reason, and the next batch is still the old policy's."""
    (path, sha256), (other_path, other_sha256) = random_ggufs
    await engine.load(path, sha256)
    before = await engine.generate([order(1)])
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(other_path.read_bytes()[:1000])
    if isinstance(engine, FakeEngine):
        engine.refused.add(other_sha256)
    with pytest.raises(SnapshotRefused, match=r"broken\.gguf"):
        await engine.load(broken, other_sha256)
    assert await engine.generate([order(1)]) == before


async def test_close_can_be_repeated_and_is_final(engine, random_ggufs):
    """Closing twice is safe; asking afterwards is an error, not a hang."""
    (path, sha256), _ = random_ggufs
    await engine.load(path, sha256)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError), trio.fail_after(5):
        await engine.generate([order(1)])


async def test_a_response_goes_on_where_an_earlier_turn_stopped(engine, random_ggufs):
    """Cut after k tokens and continued with `drawn` = k and those k in the prompt, it is the same response."""
    (path, sha256), _ = random_ggufs
    await engine.load(path, sha256)
    (whole,) = await engine.generate([order(1, 0, 4, tokens_max=8)])
    longest = max(whole.rollouts, key=lambda rollout: len(rollout.tokens))
    tokens = unpack_tokens(longest.tokens).tolist()
    assert len(tokens) >= 3
    cut = len(tokens) // 2
    rest = order(1, longest.sample, 1, prompt=[5, 6, 7, *tokens[:cut]], tokens_max=8 - cut)
    (again,) = await engine.generate([replace(rest, drawn=cut)])
    assert unpack_tokens(again.rollouts[0].tokens).tolist() == tokens[cut:]


async def test_an_adapter_is_swapped_on_the_snapshot_in_use(engine, random_ggufs, random_adapters):
    """Each adapter's rollouts are its own, the same again when it comes back, and without one the snapshot's."""
    (path, sha256), _ = random_ggufs
    first, second = (AdapterFile(*adapter) for adapter in random_adapters[:2])
    seen = []
    for adapter in (None, first, second, first, None):
        await engine.load(path, sha256, adapter)
        seen.append(await engine.generate([order(1, count=8)]))
    assert seen[1] == seen[3]
    assert seen[0] == seen[4]
    if not isinstance(engine, FakeEngine):
        assert seen[0] != seen[1] != seen[2] != seen[0]


async def test_an_adapter_that_does_not_fit_leaves_the_old_one_in_use(engine, random_ggufs, random_adapters, tmp_path):
    """Of another model, cut off, or no adapter at all: refused with a reason, and the old policy goes on."""
    (path, sha256), _ = random_ggufs
    good = AdapterFile(*random_adapters[0])
    await engine.load(path, sha256, good)
    before = await engine.generate([order(1)])
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(random_adapters[1][0].read_bytes()[:1000])
    for bad in (AdapterFile(*random_adapters[2]), AdapterFile(cut, sha256_of(cut)), AdapterFile(path, sha256)):
        if isinstance(engine, FakeEngine):
            if bad.path == path:
                continue
            engine.refused.add(bad.sha256)
        with pytest.raises(SnapshotRefused, match=bad.path.name):
            await engine.load(path, sha256, bad)
        assert await engine.generate([order(1)]) == before
