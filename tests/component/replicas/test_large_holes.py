"""Tests of large holes: a hole (damaged range) that fills most of a log file is copied in parts. Flushes are real,
because recovery depends on the data on disk."""

from __future__ import annotations

from pathlib import Path

from storage.message_store import MessageStore
from tests.support.stores.stores import intact_bodies, make_batch, small_settings

BODIES = [bytes([number]) * (4 << 20) for number in range(20)]


def open_large(root: Path, *, follows: bool) -> MessageStore:
    """Open a store whose log file is large enough for all of BODIES. `follows`: the store is a slave, in which
    consumers see only messages that the master has confirmed."""
    settings = small_settings(root, mapped_file_size_commit_log_bytes=128 << 20)
    return MessageStore.open(settings, broker_name="broker-a", on_stored=(lambda end: None) if follows else None)


def test_a_hole_of_more_than_64_mib_is_copied(tmp_path):
    master = open_large(tmp_path / "master", follows=False)
    starts = [0]
    for body in BODIES:
        master.append([make_batch([body])])
        starts.append(master.log.end_offset)
    master.close()
    with min((tmp_path / "master" / "commitlog").iterdir()).open("r+b") as file:
        for start in starts[1 : len(BODIES) - 1]:
            file.seek(start)
            file.write(b"\xaa" * 88)
    (tmp_path / "master" / "dedup").unlink()  # Delete the file "dedup", so that recovery scans the whole log.
    master = open_large(tmp_path / "master", follows=False)
    [hole] = master.mender.holes
    assert hole.size > 64 << 20
    slave = open_large(tmp_path / "slave", follows=True)
    slave.chunks.append_chunk(0, master.chunks.read_chunk(0, 1))
    parts = 0
    while slave.log.end_offset == hole.offset:
        at = slave.chunks.append_offset
        slave.chunks.append_hole(at, *master.chunks.read_hole(at, master.log.end_offset))
        parts += 1
    assert parts == -(-hole.size // (4 << 20))
    assert slave.mender.holes == master.mender.holes
    slave.chunks.append_chunk(hole.end_offset, master.chunks.read_chunk(hole.end_offset, 1))
    slave.show(slave.log.end_offset)
    assert intact_bodies(slave) == intact_bodies(master) == [BODIES[0], *[None] * 18, BODIES[-1]]
    slave.close()
    master.close()
