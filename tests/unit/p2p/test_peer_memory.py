"""Bans and back-off on a disk that does not take them."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest
import trio

from echo2.p2p import peer_file
from echo2.p2p.errors import Unreachable
from echo2.p2p.peer_memory import MANY_ROWS, RETRY_SECONDS, PeerMemory


def refuse(number):
    def refused(*_args, **_kwargs):
        raise OSError(number, "no")

    return refused


async def at_once(function, *args):
    """Instead of a thread, for which a virtual clock would not wait."""
    await trio.lowlevel.checkpoint()
    return function(*args)


def test_a_file_that_cannot_be_written_nor_removed_is_one_error_of_the_system(tmp_path, monkeypatch):
    """A file system gone read-only refuses the clearing up as well: the first refusal is what is told."""
    monkeypatch.setattr(Path, "open", refuse(errno.ENOSPC))
    monkeypatch.setattr(Path, "unlink", refuse(errno.EROFS))
    told = peer_file.write(tmp_path / "peers.json", b"x")
    assert told is not None
    assert told.errno == errno.ENOSPC


async def test_a_state_folder_gone_read_only_costs_no_ban_and_is_said_once(
    tmp_path, monkeypatch, caplog, autojump_clock
):
    """Bans hold in memory, each reason is logged once, and the file is written when the disk takes it again."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(trio.to_thread, "run_sync", at_once)
    memory = PeerMemory(tmp_path, 5, lambda: 0.0, lambda: 1000.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        with monkeypatch.context() as broken:
            for number, failures in ((errno.EROFS, 3), (errno.ENOSPC, 2)):
                broken.setattr(Path, "open", refuse(number))
                memory.ban("P", "test", None)
                await trio.sleep(failures * RETRY_SECONDS)
            with pytest.raises(Unreachable, match="banned"):
                memory.raise_if_banned("P")
            await memory.flush()
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert not (tmp_path / "peers.json").exists()
        await trio.sleep(2 * RETRY_SECONDS)
        nursery.cancel_scope.cancel()
    again = PeerMemory(tmp_path, 5, lambda: 0.0, lambda: 1000.0)
    again.recall()
    assert [ban.peer for ban in again.bans()] == ["P"]


async def test_a_flood_of_bans_is_written_seldom_and_not_in_the_loop(tmp_path, monkeypatch, autojump_clock):
    """A ban each second: written each second while they are few, then each 30 s; encoded by the thread alone."""
    threads = []

    async def threaded(function, *args):
        threads.append(encoded[0])
        result = await at_once(function, *args)
        threads.append(encoded[0])
        return result

    encoded = [0]
    encode = peer_file.encoded

    def counted(found):
        encoded[0] += 1
        return encode(found)

    monkeypatch.setattr(peer_file, "encoded", counted)
    monkeypatch.setattr(trio.to_thread, "run_sync", threaded)
    memory = PeerMemory(tmp_path, 5, lambda: 0.0, lambda: 1000.0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.run)
        for n in range(MANY_ROWS):
            memory.ban(f"few {n}", "test", None)
        await trio.sleep(0.5)
        assert encoded == [1]
        for n in range(300):
            memory.ban(f"many {n}", "test", None)
            await trio.sleep(1)
        assert 10 <= encoded[0] <= 12
        assert threads == sorted([*range(encoded[0]), *range(1, encoded[0] + 1)])
        memory.ban("last", "test", None)
        await memory.flush()
        nursery.cancel_scope.cancel()
    again = PeerMemory(tmp_path, 5, lambda: 0.0, lambda: 1000.0)
    again.recall()
    assert len(again.bans()) == MANY_ROWS + 301
    assert b"\n" not in (tmp_path / peer_file.PEER_FILE).read_bytes()
