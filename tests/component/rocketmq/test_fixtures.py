"""Tests of store directories that Apache RocketMQ 4.9 wrote: raymq opens and reads them, appends more messages, and
opens them again."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from zlib import crc32

import pytest

from raymq.common.message import PullStatus
from raymq.common.protocol.store import Boundary, FetchRequest
from raymq.records.format.decode import decode_record, decode_records
from raymq.records.format.hashing import tags_code
from raymq.records.format.message_id import parse_offset_message_id
from storage.files.config_files import parse_fastjson
from storage.message_store import MessageStore
from tests.support.stores.stores import bodies_of, make_batch, open_store, read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
DIRECTORIES = ["rocketmq-4.9-store-clean", "rocketmq-4.9-store-crash"]


@pytest.fixture(params=DIRECTORIES)
def root(request, tmp_path) -> Path:
    return Path(shutil.copytree(FIXTURES / request.param, tmp_path / "store"))


def check_manifest(store: MessageStore, root: Path) -> None:
    """Check that every message that manifest.tsv lists is stored at its listed offsets, with its body.

    For a delayed message, manifest.tsv lists the queue offset in the delay topic. The message is found in the queue of
    its delay level.
    """
    known = store.topics.queue_ids()
    delayed = {m.physical_offset: m for t, qs in known.items() for q in qs if t.startswith("SCHEDULE")
               for m in read_queue(store, t, q)}  # fmt: skip
    queues: dict[tuple[str, int], dict[int, int]] = {}
    with (root / "manifest.tsv").open() as lines:
        rows = list(csv.reader(lines, delimiter="\t"))
    assert len(rows) == 600
    read = {(t, q): read_queue(store, t, q) for t, qs in store.topics.queue_ids().items() for q in qs}
    for _, topic, queue_id, tags, keys, status, physical_offset, queue_offset, message_id, crc in rows:
        assert status == "PUT_OK"
        message = delayed.get(int(physical_offset)) or read[topic, int(queue_id)][int(queue_offset)]
        assert message.physical_offset == int(physical_offset)
        assert message.queue_offset == int(queue_offset)
        assert crc32(message.body) & 0x7FFFFFFF == int(crc)
        assert message.offset_message_id == message_id
        assert message.tags == (None if tags == "null" else tags)
        assert message.keys == (() if keys == "null" else tuple(keys.split(" ")))
        queues.setdefault((message.topic, message.queue_id), {})[message.queue_offset] = message.physical_offset
    assert {key: len(value) for key, value in queues.items()} == {key: len(value) for key, value in read.items()}


def test_every_message_of_the_manifest_reads_back(root):
    store = open_store(root)
    check_manifest(store, root)
    assert (store.status().cut_bytes, store.mender.holes) == (0, ())
    store.close()


@pytest.mark.parametrize("lost", ["consumequeue", "checkpoint", "consumequeue/Topic1", "consumequeue/Topic1/0"])
def test_no_record_is_taken_for_damaged_if_queues_are_made_again_after_a_crash(root, lost):
    (root / "abort").touch()
    remove = shutil.rmtree if (root / lost).is_dir() else Path.unlink
    remove(root / lost)
    store = open_store(root)
    check_manifest(store, root)
    assert store.mender.holes == ()
    store.close()


def test_more_can_be_appended_and_it_opens_again(root):
    store = open_store(root)
    before = len(bodies_of(store, "Topic0", 0))
    [result] = store.append([make_batch([b"%d" % i for i in range(300)], topic="Topic0")])
    assert result.queue_offset == before
    store.close()
    again = open_store(root)
    check_manifest_after_append = bodies_of(again, "Topic0", 0)
    assert check_manifest_after_append[before:] == [b"%d" % i for i in range(300)]
    assert check_manifest_after_append[:before] == [m.body for m in read_queue(again, "Topic0", 0)][:before]
    again.close()


def test_queues_made_again_from_the_log_are_the_queues_that_rocketmq_wrote(root, tmp_path):
    """The queue files that raymq rebuilds from the log equal RocketMQ's files byte for byte. This includes the queues
    of delayed messages, whose entries (units) hold delivery times."""
    written = {
        path.relative_to(root): path.read_bytes() for path in (root / "consumequeue").rglob("0*") if path.is_file()
    }
    assert len(written) == 21
    shutil.rmtree(root / "consumequeue")
    open_store(root).close()
    assert {
        path.relative_to(root): path.read_bytes() for path in (root / "consumequeue").rglob("0*") if path.is_file()
    } == (written)


def manifest(root: Path) -> list[list[str]]:
    with (root / "manifest.tsv").open() as lines:
        return list(csv.reader(lines, delimiter="\t"))


def check_queries(store: MessageStore, root: Path) -> None:
    """Check that queries find every message that manifest.tsv lists by each of its keys, its unique id, its offset id
    and its time."""
    for _, topic, _, _, keys, _, physical_offset, _, message_id, crc in manifest(root):
        found_at = parse_offset_message_id(message_id).physical_offset
        assert found_at == int(physical_offset)
        message = decode_record(store.queries.by_physical_offset(found_at))
        assert crc32(message.body) & 0x7FFFFFFF == int(crc)
        assert message.offset_message_id == message_id
        assert message.topic in (topic, "SCHEDULE_TOPIC_XXXX")
        if message.message_id != message.offset_message_id:
            [found] = decode_records(store.queries.by_unique_id(message.topic, message.message_id).records)
            assert found == message
        at = message.store_timestamp_ms
        for key in [] if keys == "null" else keys.split(" "):
            found = store.queries.by_key(message.topic, key, 64, at - 1000, at + 1000)
            assert found.complete
            assert message in decode_records(found.records), (key, message.physical_offset)
        first = store.queues.offset_by_time(message.topic, message.queue_id, at)
        last = store.queues.offset_by_time(message.topic, message.queue_id, at, Boundary.UPPER)
        assert first <= message.queue_offset <= last


def test_every_message_of_the_manifest_is_found_by_key_id_place_and_time(root):
    store = open_store(root)
    check_queries(store, root)
    assert (
        store.queries.earliest_store_time_ms() == decode_record(store.queries.by_physical_offset(0)).store_timestamp_ms
    )
    store.append([make_batch([b"%d" % i for i in range(300)], topic="Topic0")])
    check_queries(store, root)
    assert store.queries.by_unique_id("Topic0", f"{299:032X}").count == 1
    store.close()


def test_rebuilt_index_files_equal_rocketmqs_files(tmp_path):
    """The index files that raymq rebuilds from the log equal RocketMQ's files byte for byte. Only the files' names
    differ, because a file's name is its creation time."""
    root = Path(shutil.copytree(FIXTURES / DIRECTORIES[0], tmp_path / "store"))
    written = [path.read_bytes() for path in sorted((root / "index").iterdir())]
    assert len(written) == 4
    shutil.rmtree(root / "index")
    open_store(root).close()
    assert [path.read_bytes() for path in sorted((root / "index").iterdir())] == written


@pytest.mark.parametrize("tags", ["TagA", "TagB", "消息", "zzzzzzzz"])
def test_rocketmqs_tag_codes_select_the_messages_with_that_tag(root, tags):
    store = open_store(root)
    expected = [m.queue_offset for m in read_queue(store, "Topic1", 2) if m.tags == tags]
    request = FetchRequest("Topic1", 2, 0, 1000, frozenset([tags_code(tags)]))
    [result] = store.fetch([request], max_bytes=1 << 20, wait_s=0)
    found = [m.queue_offset for m in decode_records(result.records, broker_name="b")]
    assert found == expected
    assert result.status is (PullStatus.FOUND if expected else PullStatus.NO_MATCHED_MESSAGE)
    store.close()


def test_the_crashed_directory_is_recognised_and_its_preallocated_file_accepted(tmp_path):
    root = Path(shutil.copytree(FIXTURES / DIRECTORIES[1], tmp_path / "store"))
    assert not any((root / "commitlog" / "00000000000000262144").read_bytes())
    store = open_store(root)
    assert "after a crash" in store.status().recovered
    store.close()
    assert not (root / "abort").exists()


def test_the_offset_file_that_fastjson_wrote_parses():
    text = (FIXTURES / DIRECTORIES[0] / "config" / "delayOffset.json").read_text()
    assert parse_fastjson(text) == {"offsetTable": {}}
