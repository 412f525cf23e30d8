"""Tests of delayed messages in a real store. Delayed messages wait until they are due, are delivered once, and survive
stops, kills and power failures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from actors.core.broker.send_back import ReturnWriter, read_returned
from raymq.common.delay import TIMER_ROLL_QUEUE, TIMER_TOPIC, timer_queue
from raymq.common.errors import ServiceNotAvailableError, StoreCorruptError
from raymq.common.message import Message, MessageExt
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from storage.message_store import MessageStore
from tests.support.history.waiting import eventually
from tests.support.stores.clocks import Clock
from tests.support.stores.stores import killed_copy, open_store, read_queue

pytestmark = pytest.mark.usefixtures("no_flushes")

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def waiting_batch(
    messages: Sequence[Message], clock: Clock, *, real_queue_id: int = 3, producer: ProducerSequence | None = None
) -> EncodedBatch:
    """Return a batch of delayed messages, as a producer encodes it. All messages wait in one delay queue."""
    first = messages[0]
    if first.delay_level:
        topic, queue_id = SCHEDULE_TOPIC, min(first.delay_level, 18) - 1
    else:
        topic, queue_id = TIMER_TOPIC, timer_queue(first.deliver_at_ms, clock.now_ms)
    return encode_batch(
        messages,
        queue_id,
        born_host=("127.0.0.1", 5000),
        born_timestamp_ms=clock.now_ms,
        message_ids=[f"{index:032X}" for index in range(len(messages))],
        producer=producer,
        waiting=WaitingBatch(topic, [real_queue_id] * len(messages)),
    )


def level(body: bytes, delay_level: int = 3) -> Message:
    return Message("orders", body, tags="paid", keys=["k"], properties={"a": "b"}, delay_level=delay_level)


def timed(body: bytes, deliver_at_ms: int) -> Message:
    return Message("orders", body, deliver_at_ms=deliver_at_ms)


def delivered(store: MessageStore) -> list[MessageExt]:
    """Return the messages in the destination queue. The scheduler may append more messages while this function
    reads."""
    end = store.queues.bounds("orders", 3).max_offset
    [result] = store.fetch([FetchRequest("orders", 3, 0, max(end, 1))], max_bytes=1 << 24, wait_s=0)
    return decode_records(result.records, broker_name="broker-a")


def bodies(store: MessageStore) -> list[bytes]:
    return [message.body for message in delivered(store)]


def wait_for_bodies(store: MessageStore, expected: list[bytes]) -> None:
    eventually(lambda: len(bodies(store)) >= len(expected), f"{len(expected)} messages")
    assert bodies(store) == expected


def wait_for_end(store: MessageStore, end: int) -> None:
    eventually(lambda: store.queues.bounds("%RETRY%billing", 0).max_offset >= end, "the next attempt")


def wait_for_a_round(store: MessageStore) -> None:
    """Wait until the scheduler has finished a round with the present time of the test's clock."""
    looked = store._appender.read_clock
    rounds = []
    store._appender.read_clock = lambda: rounds.append(1) or looked()  # type: ignore[method-assign]
    eventually(lambda: len(rounds) >= 2, "a round of the scheduler")


def test_a_message_of_level_3_waits_in_queue_2_and_its_unit_holds_the_time_of_delivery(opened, clock):
    """A message of delay level 3 waits in queue 2, and its consume-queue entry (unit) holds the delivery time. Source:
    golden fact 18 of spec/storage.md, and golden fact 14 of spec/messaging.md."""
    clock.now_ms = 1_700_000_000_001
    store = opened(deliver=False)
    [result] = store.append([waiting_batch([level(b"x")], clock)])
    assert result.queue_offset == 0
    assert store.topics.queue_ids() == {SCHEDULE_TOPIC: [2]}
    unit = (store._root / "consumequeue" / SCHEDULE_TOPIC / "2" / ("0" * 20)).read_bytes()[:20]
    assert unit[12:].hex() == "0000018bcfe58f11"
    [message] = read_queue(store, SCHEDULE_TOPIC, 2)
    assert message.system_properties["DELAY"] == "3"
    assert message.system_properties["REAL_TOPIC"] == "orders"
    assert message.system_properties["REAL_QID"] == "3"


def test_a_delayed_message_is_delivered_when_it_is_due_and_not_before(opened, clock):
    store = opened()
    store.append([waiting_batch([level(b"x")], clock)])
    stored = clock.now_ms
    clock.now_ms += 9999
    wait_for_a_round(store)
    assert bodies(store) == []
    clock.now_ms += 1
    wait_for_bodies(store, [b"x"])
    eventually(lambda: "orders" in store.statistics().topics, "counting the delivery")
    [message] = delivered(store)
    assert (message.topic, message.tags, message.keys, message.properties) == ("orders", "paid", ("k",), {"a": "b"})
    assert message.message_id == "0" * 32
    assert message.born_timestamp_ms == stored
    assert message.store_timestamp_ms == stored + 10_000
    # A delayed message still has its delay properties after the delivery to its own topic, as in RocketMQ.
    assert message.system_properties["DELAY"] == "3"
    assert message.system_properties["REAL_TOPIC"] == "orders"


def test_a_failed_message_is_delivered_again_after_its_groups_own_interval(opened, clock):
    store = opened()
    group = GroupConfig("billing", retry_intervals_s=(0.5, 7))
    store.append([waiting_batch([level(b"x", delay_level=1)], clock)])
    clock.now_ms += 1000
    wait_for_bodies(store, [b"x"])
    at = ReturnWriter("returns", lambda count: 0)
    topic, queue_id, offset = "orders", 3, 0
    for times, interval_ms in enumerate((500, 7000, 7000)):
        [found] = store.fetch([FetchRequest(topic, queue_id, offset, 1)], max_bytes=1 << 20, wait_s=0)
        returned, _ = read_returned(found.records, group, delay_level=0, max_reconsume_times=-1, now_ms=clock.now_ms)
        store.append(at.batches("billing", returned, 1))
        clock.now_ms += interval_ms - 1
        wait_for_a_round(store)
        assert store.queues.bounds("%RETRY%billing", 0).max_offset == times
        clock.now_ms += 1
        wait_for_end(store, times + 1)
        topic, queue_id, offset = "%RETRY%billing", 0, times
    retried = read_queue(store, "%RETRY%billing", 0)
    assert [(message.body, message.reconsume_times) for message in retried] == [(b"x", 1), (b"x", 2), (b"x", 3)]


def test_a_delayed_send_that_is_repeated_is_stored_and_delivered_once(opened, clock):
    store = opened()
    batch = waiting_batch([level(b"1"), level(b"2")], clock, producer=ProducerSequence("p", 0, 0))
    [first] = store.append([batch])
    [again] = store.append([batch])
    assert again.duplicate
    assert again.queue_offset == first.queue_offset
    clock.now_ms += 10_000
    wait_for_bodies(store, [b"1", b"2"])
    [late] = store.append([batch])
    assert late.duplicate
    wait_for_a_round(store)
    assert bodies(store) == [b"1", b"2"]


def test_levels_can_be_configured_and_recovery_makes_the_same_units(opened, clock, tmp_path):
    store = opened(deliver=False, message_delay_level="7s 1d")
    store.append([waiting_batch([level(b"x", delay_level=n)], clock) for n in (1, 2, 5)])
    units = {path: path.read_bytes() for path in (tmp_path / "store" / "consumequeue").rglob("0*") if path.is_file()}
    codes = sorted(int.from_bytes(data[12:20]) - clock.now_ms for data in units.values())
    assert codes == [7000, DAY_MS, DAY_MS]
    store.close()
    shutil.rmtree(tmp_path / "store" / "consumequeue")
    opened(deliver=False, message_delay_level="7s 1d").close()
    assert {path: path.read_bytes() for path in units} == units


def test_times_of_their_own_are_kept_in_any_order(opened, clock):
    store = opened()
    now = clock.now_ms
    order = [5, 1, 4, 2, 3]
    for second in order:
        store.append([waiting_batch([timed(b"%d" % second, now + second * 1000)], clock)])
    for second in sorted(order):
        clock.now_ms = now + second * 1000 - 1
        wait_for_a_round(store)
        assert len(bodies(store)) == second - 1
        clock.now_ms += 1
        wait_for_bodies(store, [b"%d" % n for n in range(1, second + 1)])


def test_a_message_for_next_week_is_filed_again_every_day_and_delivered_once(opened, clock):
    store = opened()
    due = clock.now_ms + 6 * DAY_MS + 12_345
    store.append([waiting_batch([timed(b"x", due)], clock)])
    assert store.topics.queue_ids() == {TIMER_TOPIC: [TIMER_ROLL_QUEUE]}
    places = [(TIMER_TOPIC, TIMER_ROLL_QUEUE), (TIMER_TOPIC, timer_queue(due, due))]

    def is_filed(times: int) -> bool:
        return sum(store.queues.bounds(*place).max_offset for place in places) == times

    pins = [store.cleaner.pinned_physical_offset()]
    for day in range(1, 6):
        clock.now_ms += DAY_MS
        eventually(partial(is_filed, day + 1), "it is filed again")
        assert bodies(store) == []
        store._checkpoints.flush_queues()
        pins.append(store.cleaner.pinned_physical_offset())
    assert pins == sorted(set(pins))
    clock.now_ms = due - 1
    wait_for_a_round(store)
    assert bodies(store) == []
    clock.now_ms = due
    wait_for_bodies(store, [b"x"])


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_messages_wait_over_a_restart_and_are_delivered_once(opened, clock, tmp_path, end):
    store = opened()
    now = clock.now_ms
    store.append([waiting_batch([level(b"a%d" % n) for n in range(20)], clock)])
    store.append([waiting_batch([timed(b"b%d" % n, now + 20_000 + n)], clock) for n in range(20)])
    clock.now_ms = now + 20_009
    expected = [b"a%d" % n for n in range(20)] + [b"b%d" % n for n in range(10)]
    eventually(lambda: len(bodies(store)) == 30, "the first messages")
    root = tmp_path / "store"
    if end == "kill":
        root = killed_copy(root, tmp_path / "killed")
    store.close()
    again = opened(root)
    wait_for_a_round(again)
    assert bodies(again) == expected
    clock.now_ms += 60_000
    wait_for_bodies(again, expected + [b"b%d" % n for n in range(10, 20)])


@pytest.mark.parametrize("name", ["delayOffset.json", "timerOffset.json"])
def test_the_log_alone_shows_which_messages_were_delivered(opened, clock, tmp_path, name):
    """The offset file is missing. The store finds in the log which messages were delivered, and delivers no message
    twice."""
    store = opened()
    now = clock.now_ms
    store.append([waiting_batch([level(b"%d" % n) for n in range(5)], clock)])
    store.append([waiting_batch([timed(b"%d" % n, now + 9000)], clock) for n in range(5, 10)])
    clock.now_ms += 10_000
    eventually(lambda: len(bodies(store)) == 10, "all messages")
    killed = killed_copy(tmp_path / "store", tmp_path / "killed")
    for path in [*(killed / "config").glob(f"{name}*"), *killed.glob("snapshot*"), *killed.glob("dedup*")]:
        path.unlink()
    before = bodies(store)
    again = opened(killed)
    wait_for_a_round(again)
    assert bodies(again) == before


def test_the_offsets_are_written_in_rocketmqs_shape(opened, clock, tmp_path):
    store = opened()
    store.append([waiting_batch([level(b"x", delay_level=n) for _ in range(n)], clock) for n in (1, 2)])
    clock.now_ms += 5000
    eventually(lambda: len(bodies(store)) == 3, "all messages")
    store.close()
    written = json.loads((tmp_path / "store" / "config" / "delayOffset.json").read_text())
    assert written == {"offsetTable": {"1": 1, "2": 2}}


def test_delivery_continues_from_offsets_that_rocketmq_wrote(opened, clock, tmp_path):
    store = opened(deliver=False)
    store.append([waiting_batch([level(b"%d" % n) for n in range(5)], clock)])
    store.close()
    (tmp_path / "store" / "config" / "delayOffset.json").write_text('{"offsetTable":{3:3}}')
    clock.now_ms += 10_000
    store = opened()
    wait_for_bodies(store, [b"3", b"4"])


def test_offsets_beyond_the_queue_are_corrected_to_its_end(opened, clock, tmp_path):
    (tmp_path / "store" / "config").mkdir(parents=True)
    (tmp_path / "store" / "config" / "delayOffset.json").write_text('{"offsetTable":{3:300}}')
    store = opened()
    store.append([waiting_batch([level(b"x")], clock)])
    clock.now_ms += 10_000
    wait_for_bodies(store, [b"x"])


@pytest.mark.parametrize("text", ["[]", '{"offsetTable":[1]}', '{"offsetTable":{"x":1}}', '{"offsetTable":{"1":"y"}}'])
@pytest.mark.parametrize("name", ["delayOffset.json", "timerOffset.json"])
def test_an_unreadable_file_of_offsets_is_one_clear_error(opened, tmp_path, name, text):
    (tmp_path / "store" / "config").mkdir(parents=True)
    (tmp_path / "store" / "config" / name).write_text(text)
    with pytest.raises(StoreCorruptError, match=name):
        opened()


def test_a_delayed_message_without_a_target_is_skipped(opened, clock, caplog):
    store = opened()
    batch = waiting_batch([level(b"1"), level(b"2"), level(b"3")], clock)
    records = bytearray(batch.records)
    at = records.index(b"REAL_TOPIC", int(batch.sizes[0]))
    records[at : at + 4] = b"LOST"
    store.append([EncodedBatch(batch.topic, batch.queue_id, records, batch.sizes, batch.tag_codes, None, ())])
    clock.now_ms += 10_000
    wait_for_bodies(store, [b"1", b"3"])
    assert "REAL_TOPIC" in caplog.text
    eventually(lambda: store.status().schedule.given_up == 1, "it is counted")


def test_a_put_that_is_refused_is_tried_again(opened, clock, caplog):
    store = opened(deliver=False)
    deliver, refused = store.schedule._store_deliveries, []

    def refuse_twice(*arguments: Any) -> None:
        if len(refused) < 2:
            refused.append(1)
            raise ServiceNotAvailableError("not now")
        deliver(*arguments)

    store.schedule._store_deliveries = refuse_twice  # type: ignore[method-assign]
    store.append([waiting_batch([level(b"%d" % n) for n in range(300)], clock)])
    store.schedule.start_delivery()
    clock.now_ms += 10_000
    eventually(lambda: len(refused) == 1, "the first attempt")
    clock.now_ms += 100
    eventually(lambda: len(refused) == 2, "the second attempt")
    clock.now_ms += 100
    wait_for_bodies(store, [b"%d" % n for n in range(300)])


STEPS_MS = [-DAY_MS, -600_000, 600_000, DAY_MS]


@pytest.mark.parametrize("by_ms", STEPS_MS)
def test_a_step_of_the_clock_does_not_change_the_delay_of_a_level(opened, clock, by_ms):
    store = opened()
    store.append([waiting_batch([level(b"x")], clock)])
    clock.now_ms += 4000
    wait_for_a_round(store)
    clock.set_forward(by_ms)
    wait_for_a_round(store)
    store.append([waiting_batch([level(b"y")], clock)])
    clock.now_ms += 5999
    wait_for_a_round(store)
    assert bodies(store) == []
    clock.now_ms += 1
    wait_for_bodies(store, [b"x"])
    clock.now_ms += 3999
    wait_for_a_round(store)
    assert bodies(store) == [b"x"]
    clock.now_ms += 10_000
    wait_for_bodies(store, [b"x", b"y"])


@pytest.mark.parametrize("by_ms", STEPS_MS)
@pytest.mark.parametrize("killed", [False, True])
def test_a_level_keeps_its_delay_over_a_restart_with_another_clock(opened, clock, tmp_path, by_ms, killed):
    store = opened()
    store.append([waiting_batch([level(b"x", delay_level=5)], clock)])
    clock.now_ms += 1000
    store.cleaner.look_at_disk()
    clock.now_ms += 19_000
    root = tmp_path / "store"
    if killed:
        root = killed_copy(root, tmp_path / "killed")
    store.close()
    clock.set_forward(by_ms)
    store = opened(root)
    wait_for_a_round(store)
    clock.now_ms += 39_000
    wait_for_a_round(store)
    assert bodies(store) == []
    clock.now_ms += 60_000
    wait_for_bodies(store, [b"x"])


def test_a_new_master_with_another_clock_delivers_no_level_early(tmp_path, clock):
    """The log of a master is copied to a slave whose clock is a day ahead, and the slave becomes the master."""
    ahead = Clock()
    ahead.set_forward(DAY_MS)
    master = open_store(tmp_path / "master", clock_ms=clock)
    slave = open_store(tmp_path / "slave", clock_ms=ahead)
    try:
        master.append([waiting_batch([level(b"x", delay_level=5)], clock)])
        data = master.chunks.read_chunk(0, 1 << 20)
        assert slave.chunks.append_chunk(0, data)
        slave.cleaner.look_at_disk()
        slave.schedule.start_delivery()
        ahead.now_ms += 59_000
        wait_for_a_round(slave)
        assert bodies(slave) == []
        ahead.now_ms += 11_000
        wait_for_bodies(slave, [b"x"])
    finally:
        master.close()
        slave.close()


def test_a_store_that_does_not_deliver_keeps_everything(opened, clock):
    store = opened(deliver=False)
    store.append([waiting_batch([level(b"x")], clock)])
    clock.now_ms += DAY_MS
    assert bodies(store) == []
    assert store.status().schedule is None


def test_the_first_message_that_waits_pins_the_log(opened, clock):
    store = opened()
    assert store.cleaner.pinned_physical_offset() == store.status().max_physical_offset == 0
    [first] = store.append([waiting_batch([level(b"x")], clock)])
    [second] = store.append([waiting_batch([timed(b"y", clock.now_ms + 20_000)], clock)])
    assert store.cleaner.pinned_physical_offset() == first.physical_offset == 0
    clock.now_ms += 10_000
    wait_for_bodies(store, [b"x"])
    store._checkpoints.flush_queues()
    assert store.cleaner.pinned_physical_offset() == second.physical_offset
    clock.now_ms += 10_000
    wait_for_bodies(store, [b"x", b"y"])

    def nothing_is_pinned() -> bool:
        store._checkpoints.flush_queues()
        return store.cleaner.pinned_physical_offset() == store.status().max_physical_offset

    eventually(nothing_is_pinned, "nothing is pinned")


def test_the_status_counts_waiting_messages(opened, clock):
    store = opened()
    store.append([waiting_batch([level(b"x", delay_level=n)] * n, clock) for n in (1, 4)])
    store.append([waiting_batch([timed(b"x", clock.now_ms + HOUR_MS)], clock)])
    wait_for_a_round(store)
    schedule = store.status().schedule
    assert schedule.pending == {"level 1": 1, "level 4": 4, "deliver_at": 1}
    assert (schedule.late_ms, schedule.delivered, schedule.given_up) == (0, 0, 0)


@pytest.mark.parametrize("directory", ["rocketmq-4.9-store-clean", "rocketmq-4.9-store-crash"])
def test_messages_that_rocketmq_delayed_are_delivered_here(opened, clock, tmp_path, directory):
    """raymq delivers messages that RocketMQ has delayed. All twelve delayed messages of each store reach their
    destination queues unchanged. The clock is set to just before the last delivery time."""
    root = Path(shutil.copytree(FIXTURES / directory, tmp_path / "rocketmq"))
    quiet = opened(root, deliver=False)
    waiting = [
        m for queue_id in quiet.topics.queue_ids()[SCHEDULE_TOPIC] for m in read_queue(quiet, SCHEDULE_TOPIC, queue_id)
    ]
    before = {(t, q): quiet.queues.bounds(t, q).max_offset for t, qs in quiet.topics.queue_ids().items() for q in qs}
    clock.now_ms = max(m.store_timestamp_ms for m in waiting) + 7_200_000 - 1
    quiet.close()
    store = opened(root)
    assert len(waiting) == 12
    eventually(lambda: store.status().schedule.delivered >= 11, "all but the last of level 18")
    clock.now_ms += 1
    eventually(lambda: store.status().schedule.delivered == 12, "the last one")
    found = {}
    for (topic, queue_id), end in before.items():
        if topic != SCHEDULE_TOPIC:
            for message in read_queue(store, topic, queue_id)[end:]:
                found[message.message_id] = message
    for source in waiting:
        message = found.pop(source.message_id)
        assert (message.topic, str(message.queue_id)) == (
            source.system_properties["REAL_TOPIC"], source.system_properties["REAL_QID"],
        )  # fmt: skip
        assert (message.body, message.tags, message.keys, message.properties) == (
            source.body, source.tags, source.keys, source.properties,
        )  # fmt: skip
        assert message.born_timestamp_ms == source.born_timestamp_ms
    assert not found
