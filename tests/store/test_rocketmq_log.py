"""Logs that RocketMQ 4.9 wrote, opened and copied: nothing in them is lost, each message means what it meant there."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

import storage.raw_append
import storage.recovery
from raymq.columns import decode_columns
from raymq.hashing import tags_code
from raymq.record import record_starts
from raymq.store_api import FetchRequest
from storage.message_store import MessageStore
from tests.support.rocketmq_records import Row, write_log
from tests.support.stores import open_store, read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")

NUL = b"UNIQ_KEY\x01M%d\x02bin\x01C-string\0"


def offsets(store: MessageStore, topic: str = "T", queue_id: int = 0) -> list[int]:
    return [message.queue_offset for message in read_queue(store, topic, queue_id)]


@pytest.fixture(params=["in blocks", "singly"])
def walk(request):
    """Recovery and replication take records by the thousand, or one at a time."""
    if request.param == "singly":
        with (
            mock.patch.object(storage.recovery, "read_block", return_value=None),
            mock.patch.object(storage.raw_append, "read_block", return_value=None),
        ):
            yield
    else:
        yield


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("crashed", [False, True], ids=["after a clean stop", "after a crash"])
@pytest.mark.parametrize("which", ["one in the middle", "all", "the last"])
def test_a_record_whose_last_property_ends_in_nul_is_whole(tmp_path, which, crashed):
    of = {"one in the middle": {200}, "all": set(range(1000)), "the last": {999}}[which]
    rows = [Row("T", 0, i, NUL % i if i in of else b"TAGS\x01t\x02UNIQ_KEY\x01M%d" % i) for i in range(1000)]
    end = write_log(tmp_path / "store", rows, crashed=crashed)
    # Else a power failure between the two sectors may have done it.
    assert end % 512 != 1
    for _ in range(2):
        store = open_store(tmp_path / "store")
        assert offsets(store) == list(range(1000))
        assert (store.end_offset, store.status().cut_bytes) == (end, 0)
        messages = read_queue(store, "T")
        assert all(messages[i].properties.get("bin") == "C-string\0" for i in of)
        store.close()


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("max_bytes", [1, 20_000, 1 << 20])
def test_a_replica_takes_records_whose_last_property_ends_in_nul(tmp_path, max_bytes):
    end = write_log(tmp_path / "a", [Row("T", 0, i, NUL % i) for i in range(1000)])
    source, target = open_store(tmp_path / "a"), open_store(tmp_path / "b")
    while data := source.read_log(target.end_offset, max_bytes):
        assert target.append_log(target.end_offset, data)
    assert target.end_offset == end
    assert offsets(target) == list(range(1000))
    source.close()
    target.close()
    again = open_store(tmp_path / "b")
    assert offsets(again) == list(range(1000))
    again.close()


def torn_log(root: Path, *, crashed: bool) -> None:
    """The last record's properties cross a sector's end, and what is behind that is zero."""
    rows = [Row("T", 0, i, b"UNIQ_KEY\x01M%d" % i) for i in range(3)]
    end = write_log(root.with_name("before"), rows)
    filler = b"y" * ((-end - 91 - 1 - 9) % 512 + 512)
    write_log(root, [*rows, Row("T", 0, 3, b"UNIQ_KEY\x01M3\x02TAGS\x01t", filler)], crashed=crashed)
    file = root / "commitlog" / ("0" * 20)
    used = len(file.read_bytes().rstrip(b"\0"))
    cut = used - used % 512
    assert used - 19 < cut < used
    file.write_bytes(file.read_bytes()[:cut].ljust(file.stat().st_size, b"\0"))


@pytest.mark.usefixtures("walk")
@pytest.mark.parametrize("crashed", [False, True], ids=["after a clean stop", "after a crash"])
def test_properties_cut_at_a_sector_s_end_cost_the_last_record_after_a_crash_only(tmp_path, crashed):
    """Before a clean stop everything was flushed: nothing is torn then."""
    torn_log(tmp_path / "store", crashed=crashed)
    store = open_store(tmp_path / "store")
    assert offsets(store) == [0, 1, 2] if crashed else [0, 1, 2, 3]
    store.close()


def test_readers_see_the_nul(tmp_path):
    rows = [Row("T", 0, i, b"UNIQ_KEY\x01M%d\x02KEYS\x01k%d\0" % (i, i)) for i in range(200)]
    rows += [Row("T", 1, i, b"UNIQ_KEY\x01N%d\x02TAGS\x01red\0" % i) for i in range(200)]
    write_log(tmp_path / "store", rows)
    store = open_store(tmp_path / "store")
    assert store.query_by_key("T", "k17\0").count == 1
    assert store.query_by_key("T", "k17").count == 0
    request = FetchRequest("T", 1, 0, 1000, frozenset([tags_code("red\0")]))
    [found] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    assert found.count == 200
    columns = decode_columns(found.records, record_starts(found.records), broker_name="a")
    assert set(columns["tags"].to_pylist()) == {"red\0"}
    store.close()
