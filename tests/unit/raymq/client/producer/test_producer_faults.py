"""Tests of a producer whose brokers fail: it resends to the same queue, sends to another broker, or raises a clear
error.

The rule (raymq.client.producer.senders.retry_policy): the producer resends messages that may already be stored only to
the same queue. It may send other messages to another broker, unless the user requires their order.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace

import pytest

from raymq.client.producer.producer import Producer
from raymq.client.producer.senders.latency_fault import FAILING_S
from raymq.client.producer.settings import ProducerSettings
from raymq.common.errors import (
    ClientStateError,
    InSyncReplicasError,
    MessageIllegalError,
    NotMasterError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
    StoreFailedError,
    StoreLockedError,
    StoreNotWritableError,
    SystemBusyError,
    TopicFullError,
    TopicNotExistError,
)
from raymq.common.message import Message, MessageQueue, SendStatus
from raymq.common.protocol.route import BrokerData, QueueData, TopicRoute
from raymq.records.format.compression import Compression
from raymq.records.format.decode import decode_records
from raymq.records.format.dispatch import dispatch_view
from tests.support.clients.fakes import WAIT_S, FakeStore, topic_route
from tests.support.clients.producers import Gate, handed_over

A, B = MessageQueue("orders", "a", 0), MessageQueue("orders", "b", 0)
GONE = ServiceNotAvailableError("the actor is restarting")
BUSY = SystemBusyError("the lock is held; nothing was stored")
REFUSALS = [
    BUSY,
    NotMasterError("a", 3),
    InSyncReplicasError("a", 1, 2),
    StoreNotWritableError("the disk is full"),
    StoreLockedError("/x", "pid 1"),
]


def message(body: bytes = b"x", **more) -> Message:
    return Message("orders", body, **more)


def two(make, **settings) -> tuple[Producer, FakeStore, FakeStore]:
    """Return a producer with two brokers, and the stores of these brokers. The next message goes to broker a."""
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    producer = make(a, b, route=topic_route(a=1, b=1), **settings)
    producer.pipeline._turns._next["orders"] = 0
    return producer, a, b


def results(futures: list[Future]) -> list:
    return [future.result(WAIT_S) for future in futures]


# Tests of golden fact 35 about RocketMQ's producer, adapted to raymq (spec/messaging.md). RocketMQ limits the number of
# attempts of a send; raymq retries a send until its timeout.


def test_fact_35_an_illegal_message_is_tried_once_and_the_error_raised(make):
    producer, a, b = two(make)
    a.script = [MessageIllegalError("too long for this store")]
    with pytest.raises(MessageIllegalError, match="too long"):
        producer.send(message())
    assert (len(a.attempts), len(b.attempts)) == (1, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_fact_35_code_14_is_tried_again_in_all_modes(make, asynchronous):
    """Golden fact 35 of spec/messaging.md: after error code 14, raymq retries both synchronous and asynchronous sends.
    RocketMQ does not retry asynchronous sends, but a raymq retry cannot store a message twice."""
    store = FakeStore(script=[NotMasterError("a", 1), GONE])
    producer = make(store)
    result = producer.send_async(message()).result(WAIT_S) if asynchronous else producer.send(message())
    assert result.queue_offset == 0
    assert len(store.attempts) == 3
    assert store.everything() == [b"x"]


# Tests of messages that are sent to a second broker after the first broker has refused them or cannot be reached


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_refused_message_goes_to_another_broker(make, error):
    producer, a, b = two(make)
    a.script = [error]
    result = producer.send(message())
    assert result.queue == B
    assert (a.everything(), b.everything()) == ([], [b"x"])


def test_a_refused_message_keeps_its_unique_id(make):
    producer, a, b = two(make)
    a.script = [BUSY]
    result = producer.send(message())
    ids = [decode_records(store.attempts[0][0].records, broker_name="a")[0].message_id for store in (a, b)]
    assert ids == [result.message_id] * 2


def test_a_message_goes_to_another_broker_when_there_was_no_connection_to_its_own(make):
    producer, a, b = two(make)
    a.connects = [RequestTimeoutError("describe", 1.0)]
    assert producer.send(message()).queue == B
    assert (a.attempts, b.everything()) == ([], [b"x"])


def test_a_delayed_message_waits_at_the_other_broker_then(make):
    producer, a, b = two(make)
    a.script = [BUSY]
    producer.pipeline._turns.next_at_another_broker = lambda *arguments: MessageQueue("orders", "b", 7)
    result = producer.send(message(delay_level=3))
    assert (result.queue.broker_name, result.queue.queue_id) == ("b", 2)
    assert (a.everything(), b.everything()) == ([], [b"x"])
    assert dispatch_view(b.attempts[0][0].records).properties["REAL_QID"] == "7"


@pytest.mark.parametrize(
    "where",
    [{"sharding_key": 0}, {"queue": A}, {"selector": lambda queues, message, argument: A}],
    ids=["key", "queue", "selector"],
)
def test_a_message_that_asked_for_a_queue_stays_there(make, where):
    producer, a, b = two(make)
    a.script = [BUSY, NotMasterError("a", 1)]
    a.connects = [GONE]
    assert producer.send(message(), **where).queue == A
    assert (a.everything(), b.everything()) == ([b"x"], [])


def test_a_batch_stays_in_one_queue(make):
    producer, a, b = two(make)
    a.script = [BUSY]
    sent = producer.send_batch([message(b"%d" % n) for n in range(5)])
    assert [(result.queue, result.queue_offset) for result in sent] == [(A, n) for n in range(5)]
    assert b.attempts == []


def test_a_message_that_may_be_stored_never_goes_to_another_broker_whatever_comes_later(make):
    producer, a, b = two(make)
    a.script = [("lost", GONE), BUSY, NotMasterError("a", 1)]
    assert producer.send(message()).queue == A
    assert (a.everything(), b.everything()) == ([b"x"], [])
    assert len({(bytes(batch.records), batch.producer) for [batch] in a.attempts}) == 1


def test_messages_after_an_unanswered_batch_go_to_other_brokers(make):
    producer, a, _b = two(make)
    first, stuck = Gate(GONE), Gate(GONE)
    a.script = [first, stuck]
    pinned = producer.send_async(message(b"pinned"), queue=A)
    assert first.entered.wait(WAIT_S)
    free = producer.send_async(message(b"free"))
    producer.pipeline._turns._next["orders"] = 0
    ordered = producer.send_async(message(b"ordered"), sharding_key=0)
    first.opened.set()
    assert free.result(WAIT_S).queue == B
    assert not pinned.done()
    stuck.opened.set()
    assert [result.queue_offset for result in results([pinned, ordered])] == [0, 1]


def test_new_messages_avoid_a_broker_that_failed_until_a_while_later(make, clock):
    producer, a, _b = two(make)
    a.script = [BUSY]
    producer.send(message())
    for _ in range(5):
        producer.pipeline._turns._current.clear()
        assert producer.send(message()).queue == B
    clock.now_s += FAILING_S
    producer.pipeline._turns._next["orders"] = 0
    assert producer.send(message()).queue == A


def test_a_slow_broker_is_avoided_with_latency_fault_tolerance(make, clock):
    producer, a, _b = two(make, send_latency_enable=True)

    def slow(batches):
        clock.now_s += 0.6

    a.script = [slow]
    assert producer.send(message()).queue == A
    producer.pipeline._turns._next["orders"] = 0
    assert producer.send(message()).queue == B
    clock.now_s += 2.0
    producer.pipeline._turns._next["orders"] = 0
    assert producer.send(message()).queue == A


def test_without_another_broker_a_full_disk_is_an_error_at_once_and_a_busy_store_is_waited_for(make):
    store = FakeStore(script=[StoreNotWritableError("the disk is full")])
    producer = make(store)
    with pytest.raises(StoreNotWritableError):
        producer.send(message())
    store.script = [BUSY] * 5
    assert producer.send(message()).queue_offset == 0
    assert len(store.attempts) == 7


def test_brokers_that_all_refuse_do_not_pass_a_message_on_for_ever(make):
    producer, a, b = two(make)
    a.script, b.script = [BUSY] * 10, [BUSY] * 3
    assert producer.send(message()).queue == B
    assert (len(a.attempts), len(b.attempts)) == (1, 4)


# Tests of the errors that a send raises


def test_an_error_after_an_attempt_without_an_answer_is_not_taken_for_a_refusal(make):
    store = FakeStore(script=[("lost", GONE), StoreNotWritableError("the disk is full")])
    with pytest.raises(SendUnknownError, match="disk is full"):
        make(store).send(message())
    assert store.everything() == [b"x"]


def test_a_disk_that_fails_in_the_middle_leaves_the_outcome_unknown(make):
    producer, a, b = two(make)
    a.script = [("lost", StoreFailedError("the disk failed")), StoreNotWritableError("no more appends")]
    with pytest.raises(SendUnknownError):
        producer.send(message())
    assert (a.everything(), b.everything()) == ([b"x"], [])


@pytest.mark.parametrize(("failing", "failure"), [("script", BUSY), ("connects", GONE)])
def test_out_of_time_without_an_attempt_that_may_have_stored_it_nothing_was(make, clock, failing, failure):
    store = FakeStore()
    getattr(store, failing).extend([failure, clock.passes(failure)])
    producer = make(store)
    with pytest.raises(type(failure), match="and is not stored"):
        producer.send(message())
    producer.flush(WAIT_S)
    assert store.everything() == []


def test_a_message_after_a_failing_batch_ends_in_its_own_time(make, clock):
    stuck, again = Gate(GONE), Gate()
    store = FakeStore(script=[stuck, again])
    producer = make(store)
    first = producer.send_async(message(b"first"))
    assert stuck.entered.wait(WAIT_S)
    [short] = handed_over(producer, [message(b"short")], {}, 1.0)
    clock.now_s += 2.0
    stuck.opened.set()
    assert isinstance(short.exception(WAIT_S), ServiceNotAvailableError)
    assert not first.done()
    again.opened.set()
    assert first.result(WAIT_S).queue_offset == 0


def test_one_illegal_message_among_many_fails_alone_whoever_finds_it(make):
    def refuse_long(batches):
        too_long = max(len(record.body) for batch in batches for record in decode_records(batch.records))
        return MessageIllegalError("too long") if too_long > 50 else None

    gate = Gate()
    store = FakeStore(script=[gate] + [refuse_long] * 1000)
    producer = make(store)
    futures = [producer.send_async(message(b"0"))]
    assert gate.entered.wait(WAIT_S)
    futures += [producer.send_async(message(b"%d" % n if n % 17 else b"y" * 60)) for n in range(1, 60)]
    gate.opened.set()
    bad = [n for n, future in enumerate(futures) if future.exception(WAIT_S) is not None]
    assert bad == [17, 34, 51]
    assert store.everything() == [b"%d" % n for n in range(60) if n not in bad]
    producer.flush(WAIT_S)


def test_the_stores_limit_is_known_before_a_message_is_sent(make):
    store = FakeStore()
    store.max_message_size_bytes = 5000
    producer = make(store)
    random_body = bytes(range(256)) * 30
    futures = [producer.send_async(message(body)) for body in (b"a", b"z" * 9000, bytes(6000), b"b")]
    # With compression the messages are below the size limit.
    assert [future.exception(WAIT_S) for future in futures] == [None] * 4
    with pytest.raises(MessageIllegalError, match="limit of 5000"):
        make(store, compression=Compression()).send(message(random_body))
    assert len(store.everything()) == 4


def test_a_producers_own_limit_is_checked_before_anything_waits(make):
    producer = make(FakeStore(), max_message_size_bytes=10)
    with pytest.raises(MessageIllegalError, match="max_message_size_bytes of 10"):
        producer.send(message(b"x" * 11))
    assert producer.send(message(b"x" * 10))


# Tests of failover


def route_to(storage: str) -> TopicRoute:
    return TopicRoute("orders", {"a": BrokerData("raymq", "a", {0: storage})}, (QueueData("a", 1, 1, 6),))


@pytest.mark.parametrize("failure", [NotMasterError("a", 1), ("lost", GONE), GONE])
def test_after_a_failover_the_same_batch_with_the_same_sequence_goes_to_the_new_master(make, failure):
    old = FakeStore("storage-a-0")
    new = old.replica("storage-a-1")
    producer = make(old, new, route=route_to("storage-a-0"))
    assert producer.send(message(b"1")).queue_offset == 0

    def fail_over(batches):
        producer.test_routes.routes["orders"] = route_to("storage-a-1")
        old.script = [NotMasterError("a", 1)] * 1000
        return None if isinstance(failure, tuple) else failure

    old.script = [fail_over]
    if isinstance(failure, tuple):
        append = old.append

        def lose_the_answer(batches, timeout_s):
            append(batches, timeout_s)
            raise GONE

        old.append = lose_the_answer
    sent = [producer.send(message(body)) for body in (b"2", b"3")]
    assert [result.queue_offset for result in sent] == [1, 2]
    assert new.bodies(A) == [b"1", b"2", b"3"]
    assert len(producer.pipeline._senders) == 1
    sequences = [batch.producer.first_sequence for store in (old, new) for [batch] in store.attempts]
    assert sequences == sorted(sequences)


def test_a_route_that_cannot_be_asked_for_leaves_the_master_as_it_was(make):
    store = FakeStore(script=[GONE])
    producer = make(store)
    route = producer.pipeline.route("orders", 1.0, keyed=False)
    asked = []

    def get(topic):
        asked.append(topic)
        if len(asked) > 2:
            raise ServiceNotAvailableError("no NameServer")
        return route

    producer.test_routes.get = get
    assert producer.send(message()).queue_offset == 0
    assert len(asked) > 2


# Tests of the statuses of successful sends


def test_a_status_other_than_ok_is_a_result(make):
    store = FakeStore()
    store.status = SendStatus.FLUSH_DISK_TIMEOUT
    assert make(store).send(message()).status is SendStatus.FLUSH_DISK_TIMEOUT
    assert len(store.attempts) == 1


def test_on_request_a_stored_message_is_asked_for_again_until_it_is_on_disk_and_stored_once(make):
    store = FakeStore()
    store.status = SendStatus.FLUSH_DISK_TIMEOUT

    def flushed(batches):
        store.status = SendStatus.SEND_OK

    store.script = [None, None, ("lost", GONE), flushed]
    assert make(store, retry_when_not_store_ok=True).send(message()).status is SendStatus.SEND_OK
    assert len(store.attempts) == 4
    assert store.everything() == [b"x"]


def test_a_message_that_never_gets_on_disk_in_time_still_has_a_result(make, clock):
    store = FakeStore(script=[None, clock.passes()])
    store.status = SendStatus.FLUSH_DISK_TIMEOUT
    result = make(store, retry_when_not_store_ok=True).send(message())
    assert result.status is SendStatus.FLUSH_DISK_TIMEOUT
    assert store.everything() == [b"x"]


# Tests of closing a producer


def test_close_gives_up_messages_that_cannot_be_sent_and_every_future_ends(make):
    lost = Gate(("lost", GONE))
    store = FakeStore(script=[lost] + [GONE] * 1_000_000)
    producer = make(store, send_timeout_s=0.05)
    [pinned] = handed_over(producer, [message(b"1")], {}, 1000.0)
    assert lost.entered.wait(WAIT_S)
    lost.opened.set()
    [waiting] = handed_over(producer, [message(b"2")], {}, 1000.0)
    with pytest.raises(RequestTimeoutError, match="the flush of the producer"):
        producer.close()
    assert isinstance(pinned.exception(WAIT_S), SendUnknownError)
    assert isinstance(waiting.exception(WAIT_S), (ServiceNotAvailableError, SendUnknownError))
    assert not producer.pipeline._senders["a"].alive


def test_sends_from_other_threads_while_the_producer_is_closed_are_acknowledged_or_refused(make):
    for _ in range(10):
        store = FakeStore()
        producer = make(store, max_buffered_messages=20)
        futures: list[Future] = []
        started = threading.Event()

        def send(producer=producer, futures=futures, started=started) -> None:
            try:
                for number in range(100_000):
                    futures.append(producer.send_async(message(b"%d" % number)))
                    started.set()
            except ClientStateError:
                pass

        threads = [threading.Thread(target=send) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert started.wait(WAIT_S)
        producer.close()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert len(results(futures)) == len(store.everything())


def test_with_when_full_raise_a_full_buffer_is_an_error_at_once(make):
    gate = Gate()
    producer = make(FakeStore(script=[gate]), max_buffered_messages=1, when_full="raise")
    first = producer.send_async(message())
    with pytest.raises(SystemBusyError, match="is full"):
        producer.send_async(message())
    gate.opened.set()
    first.result(WAIT_S)
    producer.flush(WAIT_S)
    assert producer.send(message())


def test_fact_12_a_topic_that_is_sent_to_is_asked_for_with_the_producers_number_of_queues(make):
    """If the topic of a send is unknown, the producer requests that the broker creates it, with the producer's own
    number of queues. Golden fact 12 (spec/messaging.md). Other tests check that the broker creates the topic with this
    number (tests/unit/raymq/remoting/test_route_cache.py and the tests of the actors' cores)."""
    producer = make(FakeStore(), default_topic_queue_nums=16)
    producer.send(message())
    assert producer.test_routes.asked_to_create == [("orders", 16)]
    assert ProducerSettings().default_topic_queue_nums == 4


# Tests of a broker that has not registered with any NameServer yet


def test_a_message_with_a_key_waits_for_the_broker_of_its_queue(make):
    store, other = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    partial = replace(topic_route(b=1), layout="a:1;b:1", complete=False)
    producer = make(store, other, route=partial)
    asked = threading.Event()
    producer.test_routes.invalidate = lambda topic: asked.set()
    waiting = producer.send_async(message(b"first"), sharding_key=0)
    assert asked.wait(WAIT_S)  # the event is set after a failed send attempt has invalidated the route
    assert producer.send(message(b"there"), sharding_key=1).queue == B
    assert not waiting.done()
    producer.test_routes.routes["orders"] = topic_route(a=1, b=1)
    assert waiting.result(WAIT_S).queue == A
    assert (store.everything(), other.everything()) == ([b"first"], [b"there"])


def test_a_broker_that_does_not_come_back_in_time_is_named(make):
    producer = make(FakeStore("storage-b-0"), route=replace(topic_route(b=1), layout="a:1;b:1"))
    with pytest.raises(ServiceNotAvailableError, match=r"is not stored .*'a', which has queues of topic"):
        producer.send(message(), sharding_key=0, timeout_s=0.1)


@pytest.mark.parametrize("where", [{}, {"sharding_key": 0}])
def test_a_send_waits_while_the_existence_of_its_topic_is_unknown(make, where):
    producer, failures = make(FakeStore()), [GONE, RequestTimeoutError("topic_route", 5.0), GONE]
    known = producer.test_routes.routes["orders"]

    def get(topic):
        if failures:
            raise failures.pop()
        return known

    producer.test_routes.get = get
    assert producer.send(message(), **where).queue_offset == 0
    producer.test_routes.get = lambda topic: (_ for _ in ()).throw(GONE)
    with pytest.raises(ServiceNotAvailableError, match="restarting"):
        producer.send(message(), timeout_s=0.1, **where)


def test_a_send_to_a_topic_that_does_not_exist_fails_at_once(make):
    producer, asked = make(FakeStore()), []

    def get(topic):
        asked.append(topic)
        raise TopicNotExistError(topic)

    producer.test_routes.get = get
    with pytest.raises(TopicNotExistError):
        producer.send(message(), timeout_s=WAIT_S)
    assert asked == ["orders"]


# Tests of bounded topics that are full: a producer waits for room, and other topics do not wait


def full(*, waits: bool = True, retry_after_s: float = 0.01, most: int = 100) -> TopicFullError:
    return TopicFullError("orders", "billing", "100 messages", waits, most, retry_after_s)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_producer_waits_until_a_full_topic_has_room(make, asynchronous):
    store = FakeStore(script=[full(), full(), full()])
    producer = make(store)
    result = producer.send_async(message()).result(WAIT_S) if asynchronous else producer.send(message())
    assert result.queue_offset == 0
    assert len(store.attempts) == 4
    assert store.everything() == [b"x"]


def test_a_topic_that_stays_full_ends_a_send_at_its_timeout_with_the_typed_error(make):
    store = FakeStore(script=[full()] * 10_000)
    producer = make(store)
    with pytest.raises(TopicFullError, match=r"is full for 0\.3 s") as caught:
        producer.send(message(), timeout_s=0.3)
    assert caught.value.retryable
    assert store.everything() == []


def test_a_topic_with_the_policy_refuse_fails_a_send_at_once(make):
    store = FakeStore(script=[full(waits=False)])
    producer = make(store)
    with pytest.raises(TopicFullError):
        producer.send(message())
    assert len(store.attempts) == 1
    assert producer.send(message(b"y")).queue_offset == 0


def test_batches_of_a_full_topic_wait_and_are_stored_whole(make):
    store = FakeStore(script=[full(most=2), full(most=2)])
    producer = make(store, route=topic_route(a=1))
    bodies = [b"%d" % number for number in range(9)]
    futures = [producer.send_async(message(body)) for body in bodies]
    producer.send_batch([message(body) for body in bodies], sharding_key="k")
    assert len(results(futures)) == 9
    assert sorted(store.everything()) == sorted(bodies * 2)


def test_a_full_topic_is_left_for_a_broker_with_room(make):
    producer, a, _ = two(make)
    a.script = [full(retry_after_s=60.0)]
    assert producer.send(message()).queue == B
