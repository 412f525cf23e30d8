"""Tests of how recovery searches the log for records whose queue or offset was changed by damage. If queues are
missing, the number of searches is limited, and recovery then trusts all records."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

import pytest

import storage.recovery.changed_places
import storage.recovery.earlier_records
import storage.recovery.log_files
import storage.recovery.walk
from storage.dispatch import record_blocks
from storage.recovery.changed_places import FRUITLESS_MAX
from storage.recovery.claims import ClaimReader
from storage.recovery.earlier_records import EarlierRecords
from tests.support.stores.damage import FIELDS, flip
from tests.support.stores.stores import bodies_of, make_batch, open_store, placed_bodies

pytestmark = pytest.mark.usefixtures("no_flushes")


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """Yield a mock that counts recovery's searches of the log. Each search reads only a few records."""
    for module in (storage.recovery.changed_places, storage.recovery.walk):
        monkeypatch.setattr(module, "SURVEY_BYTES", 1000)
    for module in (record_blocks, storage.recovery.log_files):
        monkeypatch.setattr(module, "BLOCK_BYTES", 500)
    with mock.patch.object(ClaimReader, "read", autospec=True, side_effect=ClaimReader.read) as counted:
        yield counted


def test_a_topic_that_rocketmq_deleted_is_searched_once(tmp_path: Path, surveys: mock.Mock) -> None:
    """Recovery searches once for a topic that RocketMQ deleted. RocketMQ does not record the deletion, so after a clean
    stop the topic's records have no queue."""
    store = open_store(tmp_path)
    for number in range(200):
        store.append([make_batch([b"%d" % number])])
    store.append([make_batch([b"kept"], topic="others")])
    store.close()
    (tmp_path / "dedup").unlink()
    shutil.rmtree(tmp_path / "consumequeue/orders")
    store = open_store(tmp_path)
    assert surveys.call_count <= 2
    assert (store.mender.holes, store.topics.queue_ids()) == ((), {"others": [0]})
    assert bodies_of(store, "others") == [b"kept"]
    store.close()


def test_searches_that_find_nothing_come_to_an_end(tmp_path: Path, surveys: mock.Mock, caplog) -> None:
    """Recovery stops searching for neighbouring records of a topic after several searches have found nothing. In this
    test the log contains many deleted topics with few records, which are far from each other."""
    store = open_store(tmp_path)
    for number in range(150):
        store.append([make_batch([b"%d" % number], topic=f"topic-of-{number}"), make_batch([b"x" * 900])])
    store.close()
    (tmp_path / "dedup").unlink()
    for path in (tmp_path / "consumequeue").glob("topic-of-*"):
        shutil.rmtree(path)
    store = open_store(tmp_path)
    assert surveys.call_count == FRUITLESS_MAX
    assert "are accepted" in caplog.text
    assert (store.mender.holes, store.topics.queue_ids(), len(bodies_of(store))) == ((), {"orders": [0]}, 150)
    store.close()


@pytest.mark.parametrize("ended", ["cleanly", "killed"])
@pytest.mark.parametrize("first", [0, 6, 37])
def test_damaged_neighbours_do_not_give_a_changed_record_their_place(tmp_path: Path, first: int, ended: str) -> None:
    """Two adjacent records are damaged while the store is closed, and the queue or queue offset of one has changed. The
    changed record must not take the place of its neighbour."""
    bodies = [b"%03d" % number + b"x" * 100 for number in range(40)]
    stopped = tmp_path / "stopped"
    store = open_store(stopped)
    store.append([make_batch(bodies)])
    queue = store._parts.queues.get_plain("orders", 0)
    assert queue is not None
    units = [queue.units(offset, 1)[0] for offset in range(len(bodies))]
    store.close()
    for pair in product(FIELDS, FIELDS):
        if not {"queue id", "queue offset", "topic"}.intersection(pair):
            continue
        root = tmp_path / "-".join(pair)
        shutil.copytree(stopped, root)
        if ended == "killed":
            (root / "abort").touch()
        for at, field in enumerate(pair, first):
            flip(root, int(units[at]["physical_offset"]), field)
        store = open_store(root)
        found = placed_bodies(store)
        queue = store._parts.queues.get_plain("orders", 0)
        assert queue is not None
        now = [queue.units(offset, 1)[0]["physical_offset"] for offset in range(len(bodies))]
        store.close()
        assert now == [unit["physical_offset"] for unit in units], pair
        assert {body for body, own in zip(found, bodies, strict=True) if body != own} <= {None}, pair
        assert found[:first] + found[first + 2 :] == bodies[:first] + bodies[first + 2 :], pair


def test_only_some_records_before_the_walk_are_compared_with_all_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.recovery.earlier_records, "MISFITS_MAX", 100)
    count = 300
    store = open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 18)
    store.append([make_batch([b"x"] * count, producer=("p", 0, 0))])
    while store.log.end_offset < 1 << 18:
        store.append([make_batch([b"x" * 1000] * 50, topic="others")])
    store.close()
    (tmp_path / "dedup").unlink()
    shutil.rmtree(tmp_path / "consumequeue/orders")
    with mock.patch.object(
        EarlierRecords, "_by_its_unit", autospec=True, side_effect=EarlierRecords._by_its_unit
    ) as asked:
        store = open_store(tmp_path, mapped_file_size_commit_log_bytes=1 << 18)
    assert asked.call_count == 100
    [row] = store._parts.dedup.rows()
    assert (row.producer_id, [one[:2] for one in row.ranges]) == ("p", [(0, count)])
    store.close()
