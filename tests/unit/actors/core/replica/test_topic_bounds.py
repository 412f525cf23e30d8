"""Tests of the limits of bounded topics: what a store accepts, and which waiting producer gets the next room."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from actors.core.replica.topic_bounds import PLACE_S, RETRY_MAX_S, RETRY_MIN_S, TopicBounds
from raymq.common.errors import NotMasterError, StoreNotWritableError, SystemBusyError, TopicFullError
from raymq.common.message import PROPERTY_REAL_TOPIC
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.bounds import BoundedTopic, TopicBacklog
from tests.support.stores.stores import make_batch


class Store:
    """A store with one bounded topic. A test appends and consumes its messages, and measures the backlog."""

    def __init__(
        self, limit: int | None = 10, *, policy: str = "block", max_bytes: int | None = None, **options
    ) -> None:
        self.bound = BoundedTopic("orders", 1, limit, max_bytes, policy, False, {"billing": {}})
        self.bounds = TopicBounds(
            options.pop("expected", list), options.pop("is_stored", lambda batch: False), **options
        )
        self.messages = self.bytes = self.consumed = self.consumed_bytes = 0
        self.now_s = 100.0
        self.epoch = 0

    @property
    def backlog(self) -> int:
        return self.messages - self.consumed

    def measure(self, bounds: list[BoundedTopic] | None = None) -> list[TopicBacklog]:
        bounds = [self.bound] if bounds is None else bounds
        counters = self.bounds.counters(self.epoch)
        size = self.bytes - self.consumed_bytes
        backlogs = [TopicBacklog(one.topic, "billing", self.backlog, size, [(0, 0)]) for one in bounds]
        return self.bounds.change(bounds, backlogs, counters, self.epoch, self.now_s)

    def send(self, producer: str, messages: int = 1, *, topic: str = "orders", body: bytes = b"x") -> bool:
        """Append messages. Returns False if the topic is full."""
        batch = make_batch([body] * messages, topic=topic, producer=(producer, 0, 0))

        def store() -> None:
            self.messages += messages if topic == "orders" else 0
            self.bytes += len(batch.records) if topic == "orders" else 0

        try:
            self.bounds.append([batch], self.epoch, self.now_s, store)
        except TopicFullError:
            return False
        return True

    def consume(self, messages: int) -> None:
        self.consumed += messages


def test_a_topic_takes_messages_up_to_its_limit_and_again_after_the_group_consumed():
    store = Store(10)
    store.measure()
    assert [store.send("p") for _ in range(12)] == [True] * 10 + [False] * 2
    store.consume(3)
    assert not store.send("p"), "the store does not see the commit before the next measurement"
    store.measure()
    assert [store.send("p") for _ in range(4)] == [True] * 3 + [False]
    assert store.backlog == 10


def test_an_old_measurement_never_lets_the_backlog_exceed_the_limit():
    store = Store(10)
    counters = store.bounds.counters(0)
    stale = TopicBacklog("orders", "billing", 0, 0, [(0, 0)])
    store.bounds.change([store.bound], [stale], counters, 0, store.now_s)
    late = store.bounds.counters(0)
    assert store.send("p", 6)
    store.bounds.change([store.bound], [stale], late, 0, store.now_s)
    assert store.send("p", 4)
    assert not store.send("p")
    assert store.backlog == 10


def test_topics_without_a_limit_are_not_affected():
    store = Store(1)
    store.measure()
    assert store.send("p")
    assert all(store.send("p", topic="other") for _ in range(5))
    assert not store.send("p")
    store.measure([])
    assert store.send("p", 100)


def test_the_limit_in_bytes_counts_records():
    store = Store(None, max_bytes=10_000)
    store.measure()
    while store.send("p", body=b"x" * 1000):
        pass
    assert 8000 < store.bytes <= 10_000
    batch = make_batch([b"x" * 1000] * 4, producer=("p", 0, 0))
    with pytest.raises(TopicFullError) as full:
        store.bounds.append([batch], 0, store.now_s, lambda: None)
    assert full.value.most == 1
    assert "10000 bytes" in str(full.value)


def test_a_request_for_several_topics_is_stored_whole_or_not_at_all():
    store = Store(10)
    store.measure([store.bound, store.bound._replace(topic="bills", max_messages=4)])
    assert store.send("p", 2, topic="bills")
    both = [make_batch([b"x"] * 3, producer=("p", 0, 0)), make_batch([b"x"] * 3, topic="bills", producer=("p", 0, 0))]
    with pytest.raises(TopicFullError, match="bills"):
        store.bounds.append(both, 0, store.now_s, lambda: pytest.fail("a part was stored"))
    assert store.send("p", 10), "the refused request holds no room of the other topic"


def test_a_failed_append_takes_no_room():
    store = Store(2)
    store.measure()

    def fail() -> None:
        raise StoreNotWritableError("the disk is full")

    for _ in range(5):
        with pytest.raises(StoreNotWritableError):
            store.bounds.append([make_batch([b"x"] * 2, producer=("p", 0, 0))], 0, store.now_s, fail)
    assert store.send("p", 2)


def test_an_append_above_the_limit_is_taken_if_the_topic_is_empty():
    store = Store(10)
    store.measure()
    assert store.send("q")
    assert not store.send("p", 25)
    store.consume(1)
    store.measure()
    assert store.send("p", 25)
    assert not store.send("q")


def test_waiting_producers_get_room_in_their_order_and_nobody_overtakes():
    store = Store(10)
    store.measure()
    assert store.send("first", 10)
    assert not store.send("large", 8)
    assert not store.send("small", 1)
    store.consume(3)
    store.measure()
    assert not store.send("late", 1), "room for one message belongs to the producers that wait"
    assert not store.send("small", 1), "a later producer does not starve an earlier one with a large append"
    store.consume(7)
    store.measure()
    assert store.send("small", 1)
    assert store.send("large", 8)
    assert store.send("late", 1)


def test_a_producer_that_does_not_come_back_loses_its_place():
    store = Store(10)
    store.measure()
    store.send("first", 10)
    assert not store.send("gone", 10)
    store.consume(10)
    store.measure()
    assert not store.send("other")
    store.now_s += PLACE_S + 1
    store.measure()
    assert store.send("other")


def test_many_producers_get_about_equal_shares():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    store, got = Store(20), Counter()
    names = [f"p{number}" for number in range(50)]
    for _ in range(400):
        store.measure()
        chance.shuffle(names)
        for name in names:
            got[name] += store.send(name)
        assert store.backlog <= 20
        store.consume(chance.randrange(min(store.backlog, 20) + 1))
        store.now_s += 0.1
    assert min(got[name] for name in names) >= 0.8 * max(got.values()), got


def test_a_producer_far_back_is_asked_to_come_back_later():
    store = Store(1)
    store.measure()
    store.send("p")
    pauses = []
    for number in range(400):
        with pytest.raises(TopicFullError) as full:
            store.bounds.append([make_batch([b"x"], producer=(f"p{number}", 0, 0))], 0, store.now_s, lambda: None)
        pauses.append(full.value.retry_after_s)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (RETRY_MIN_S, RETRY_MAX_S)


def test_the_policy_refuse_gives_no_place_and_the_policy_drop_no_limit():
    store = Store(2, policy="refuse")
    store.measure()
    assert store.send("p", 2)
    with pytest.raises(TopicFullError) as full:
        store.bounds.append([make_batch([b"x"], producer=("q", 0, 0))], 0, store.now_s, lambda: None)
    assert not full.value.waits
    store.consume(1)
    [shown] = store.measure()
    assert (shown.refused, shown.waiting) == (1, 0)
    assert store.send("p"), "the room belongs to nobody"
    store.bound = store.bound._replace(policy="drop")
    store.measure()
    assert store.send("p", 100)


def test_a_new_master_takes_nothing_for_a_bounded_topic_before_a_measurement():
    store = Store(10, expected=lambda: ["orders"])
    batch = make_batch([b"x"], producer=("p", 0, 0))
    with pytest.raises(SystemBusyError, match="measured"):
        store.bounds.append([batch], 0, store.now_s, lambda: None)
    store.measure()
    assert store.send("p", 4)
    store.epoch = 3
    with pytest.raises(SystemBusyError, match="measured"):
        store.bounds.append([batch], 3, store.now_s, lambda: None)
    old = store.bounds.change([store.bound], [TopicBacklog("orders", "", 0, 0, [])], {}, 2, store.now_s)
    assert len(old) == 1
    with pytest.raises(SystemBusyError, match="measured"):
        store.bounds.append([batch], 3, store.now_s, lambda: None)
    store.measure()
    assert store.send("p", 6)
    assert not store.send("p")


def test_another_replica_is_named_before_a_producer_waits_for_room_at_an_old_master():
    def require_master() -> None:
        raise NotMasterError("broker-a", 4)

    store = Store(1, require_master=require_master)
    store.measure()
    assert store.send("p")
    with pytest.raises(NotMasterError):
        store.send("p")


def test_a_repetition_of_a_stored_append_needs_no_room():
    store = Store(1, is_stored=lambda batch: batch.producer.producer_id == "again")
    store.measure()
    assert store.send("p")
    assert store.send("again"), "the store recognises the repetition, and its producer gets the answer"
    assert not store.send("p")


def test_half_messages_and_delayed_messages_count_for_their_topic():
    store = Store(2)
    store.measure()
    assert store.send("p", 2)
    half = make_batch([b"x"], topic=HALF_TOPIC, producer=("t", 0, 0), extra_properties={PROPERTY_REAL_TOPIC: "orders"})
    with pytest.raises(TopicFullError, match="orders"):
        store.bounds.append([half], 0, store.now_s, lambda: None)
