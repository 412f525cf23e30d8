"""A flush that overtakes the writer: a message is on disk before its queue's unit is announced, and is seen all the
same once it is acknowledged."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from raymq.config.store import FlushDiskType
from tests.support.stores.stores import bodies_of, make_batch, open_store

WAIT_S = 60.0


@pytest.mark.parametrize("messages", [1, 3])
def test_a_message_that_a_flush_overtook_is_visible_and_wakes_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int
) -> None:
    store = open_store(tmp_path / "store", flush_disk_type=FlushDiskType.SYNC_FLUSH)
    try:
        store.append([make_batch([b"first"])])
        visibility = store._parts.visibility
        add = visibility.add

        def overtaken(end_offset: int, *place: Any) -> None:
            assert store._gate.wait_flushed(end_offset)  # as if the writer had lost its processor for that long
            add(end_offset, *place)

        monkeypatch.setattr(visibility, "add", overtaken)
        woken = threading.Event()
        store.polls.register([("orders", 0)], woken.set)
        bodies = [b"%d" % number for number in range(messages)]
        store.append([make_batch(bodies)])
        assert bodies_of(store) == [b"first", *bodies]
        assert woken.wait(WAIT_S)
    finally:
        store.close()
