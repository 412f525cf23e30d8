"""Tests of reading the messages of a consume task, either in place from the store's mapped files, or from transferred
bytes."""

from __future__ import annotations

import numpy as np
import pytest

from actors.core.consume.process_queue import ConsumeTask, ProcessQueue
from actors.pull.tasks_in_flight import ship_task
from raymq.client.consumer.push.task_reader import TaskReader
from raymq.common.errors import BodyUnreadableError
from raymq.common.protocol.consume_result import ShippedTask
from raymq.records.format.layout import BODY_SIZE_OFFSET
from tests.support.clients.tasks import STORED_QUEUE, located, store_records
from tests.support.stores.stores import LOG_FILE_BYTES


def task(records, *, in_place: bool) -> ShippedTask:
    return ship_task(ConsumeTask(ProcessQueue(STORED_QUEUE), records, number=3), in_place=in_place)


def bodies(messages) -> list[int]:
    return [int(message.body.split()[0]) for message in messages]


@pytest.fixture
def root(tmp_path):
    store_records(tmp_path, 150)  # the messages fill about three log files
    return tmp_path


@pytest.mark.parametrize("pick", [range(150), range(40, 130), [5], [1, 2, 70, 71, 149]])
def test_a_task_in_place_has_the_messages_of_one_in_bytes(root, pick):
    records = located(root, 0, 150).pick(pick)
    in_place, in_bytes = task(records, in_place=True), task(records, in_place=False)
    assert not in_place.records
    assert in_place.log is not None
    assert in_bytes.log is None
    assert in_place.count == in_bytes.count == len(pick)
    reader = TaskReader()
    here, damaged = reader.messages(in_place)
    there, _ = reader.messages(in_bytes)
    assert here == there
    assert bodies(here) == list(pick)
    assert {message.broker_name for message in here} == {"broker-a"}
    assert not damaged


def test_records_of_deleted_files_are_read_only_from_bytes(root):
    records = located(root, 0, 20)
    (root / "commitlog" / f"{0:020d}").unlink()
    assert TaskReader().messages(task(records, in_place=True)) is None
    there, _ = TaskReader().messages(task(records, in_place=False))
    assert bodies(there) == list(range(20))


def test_messages_stay_readable_after_their_file_is_deleted(root):
    messages, _ = TaskReader().messages(task(located(root, 0, 20), in_place=True))
    (root / "commitlog" / f"{0:020d}").unlink()
    assert bodies(messages) == list(range(20))


def test_a_damaged_record_stands_for_itself(root):
    records = located(root, 0, 20)
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[int(records.parts[0].starts[7]) + 200] ^= 1
    path.write_bytes(data)
    messages, damaged = TaskReader().messages(task(located(root, 0, 20), in_place=True))
    assert damaged
    error = messages.pop(7)
    assert isinstance(error, BodyUnreadableError)
    assert (error.queue, error.queue_offset, error.record_damaged) == (str(STORED_QUEUE), 7, False)
    assert bodies(messages) == [*range(7), *range(8, 20)]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_record_with_wrong_lengths_stands_for_itself(root, in_place):
    """A record with wrong lengths damages no other record. The positions of records come from the consume queue, not
    from the lengths in the records."""
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[int(located(root, 0, 20).parts[0].starts[7]) + BODY_SIZE_OFFSET] ^= 1
    path.write_bytes(data)
    messages, damaged = TaskReader().messages(task(located(root, 0, 20), in_place=in_place))
    assert damaged
    error = messages.pop(7)
    assert (error.queue, error.queue_offset, error.record_damaged) == (str(STORED_QUEUE), 7, True)
    assert bodies(messages) == [*range(7), *range(8, 20)]


def test_records_in_place_are_cut_joined_and_counted_as_in_memory(root):
    records = located(root, 10, 120)
    memory = records.in_memory()
    assert len(records.parts) > 1
    assert (records.size_bytes, list(records.offsets)) == (memory.size_bytes, list(memory.offsets))
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    random = np.random.default_rng(seed)
    for _ in range(20):
        first, last = sorted(random.choice(121, 2, replace=False).tolist())
        assert records.part(first, last).data == memory.part(first, last).data
        wanted = sorted(random.choice(120, int(random.integers(1, 120)), replace=False).tolist())
        assert records.pick(wanted).data == memory.pick(wanted).data
        assert list(records.pick(wanted).offsets) == list(memory.pick(wanted).offsets)
        assert records.size_of(wanted) == memory.size_of(wanted) == records.pick(wanted).size_bytes
    again = records.failed_once_more([3])
    assert again == memory.failed_once_more([3])
    assert (records.reconsume_times(3), again.reconsume_times(3)) == (0, 1)
    assert int(records.parts[0].starts[-1]) < LOG_FILE_BYTES
