"""Tests of a producer whose store fails, loses answers or is late."""

from __future__ import annotations

import contextlib
import gc
import pickle
import random
import threading
from concurrent.futures import Future, wait

import pytest

from raymq.client.producer.completion import Completion
from raymq.client.producer.producer import Producer
from raymq.client.producer.senders import send_batch
from raymq.client.producer.senders.sender import Sender
from raymq.common.errors import (
    ClientStateError,
    IllegalNameError,
    InvalidArgumentError,
    MessageIllegalError,
    RaymqError,
    RequestTimeoutError,
    SendUnknownError,
    ServiceNotAvailableError,
    StoreNotWritableError,
    SystemBusyError,
)
from raymq.common.message import Message, MessageQueue, SendStatus, SystemMessage
from raymq.records.format.decode import decode_records
from raymq.records.format.hashing import java_hash
from raymq.records.format.message_id import parse_offset_message_id
from tests.support.clients.fakes import WAIT_S, FakeRoutes, FakeStore, no_thread_starts, topic_route
from tests.support.clients.producers import Gate, handed_over
from tests.support.history.waiting import eventually

QUEUE = MessageQueue("orders", "a", 0)
AWAY = ServiceNotAvailableError("the actor is restarting")
LATE = RequestTimeoutError("append", 1.0)


def messages(*bodies: bytes) -> list[Message]:
    return [Message("orders", body) for body in bodies]


def results(futures: list[Future]):
    return [future.result(WAIT_S) for future in futures]


def test_a_send_returns_the_queue_and_offset_of_the_message(make):
    result = make(FakeStore()).send(Message("orders", b"one"), timeout_s=WAIT_S)
    assert (result.status, result.queue, result.queue_offset) == (SendStatus.SEND_OK, QUEUE, 0)
    assert len(result.message_id) == 32
    assert parse_offset_message_id(result.offset_message_id) == ("127.0.0.1", 10911, 0)


def test_every_message_of_a_batch_has_its_own_offset_and_id(make):
    store = FakeStore()
    sent = make(store).send_batch(messages(b"one", b"three", b"two"))
    assert [result.queue_offset for result in sent] == [0, 1, 2]
    [[batch]] = store.attempts
    records = decode_records(batch.records, broker_name="a")
    assert [result.message_id for result in sent] == [record.message_id for record in records]
    offsets = [parse_offset_message_id(result.offset_message_id).physical_offset for result in sent]
    assert offsets == [0, int(batch.sizes[0]), int(batch.sizes[:2].sum())]


def test_messages_gather_while_a_request_is_under_way_and_go_together_in_order(make):
    gate = Gate()
    store = FakeStore(script=[gate])
    producer = make(store)
    futures = [producer.send_async(message) for message in messages(b"0")]
    assert gate.entered.wait(WAIT_S)
    futures += [producer.send_async(message) for message in messages(*[b"%d" % n for n in range(1, 50)])]
    gate.opened.set()
    assert [result.queue_offset for result in results(futures)] == list(range(50))
    assert [len(batch) for [batch] in store.attempts] == [1, 49]


@pytest.mark.parametrize(
    "script", [[AWAY], [LATE, AWAY, LATE], [("lost", AWAY)], [("lost", LATE), AWAY, ("lost", LATE)]]
)
def test_a_request_without_an_answer_is_sent_again_the_very_same_bytes_and_stored_once(make, script):
    store = FakeStore(script=list(script))
    producer = make(store)
    sent = results([producer.send_async(message) for message in messages(b"one", b"two")])
    assert store.bodies(QUEUE) == [b"one", b"two"]
    assert [result.queue_offset for result in sent] == [0, 1]
    repeated = store.attempts[: len(script) + 1]
    assert len({(bytes(batch.records), batch.producer) for [batch] in repeated}) == 1


def test_order_in_a_queue_is_that_of_the_sends_whatever_fails(make):
    for seed in range(20):
        print("seed", seed)
        chance = random.Random(seed)
        store = FakeStore(script=[chance.choice([None, AWAY, LATE, ("lost", AWAY), ("lost", LATE)]) for _ in range(30)])
        producer = make(store, route=topic_route(a=2))
        futures = [
            producer.send_async(Message("orders", b"%d" % n), sharding_key=chance.choice(["x", "y"])) for n in range(40)
        ]
        sent = results(futures)
        assert sorted(store.everything(), key=int) == [b"%d" % n for n in range(40)]
        for bodies in store.queues.values():
            assert bodies == sorted(bodies, key=int)
        for number, result in enumerate(sent):
            assert store.bodies(result.queue)[result.queue_offset] == b"%d" % number


def test_sequences_grow_per_queue_over_all_messages(make):
    store = FakeStore()
    producer = make(store, route=topic_route(a=2))
    key = {java_hash(key) % 2: key for key in ("x", "y")}
    for number in (0, 0, 1, 0):
        producer.send_batch(messages(b"a", b"b"), sharding_key=key[number])
    sequences = [(batch.queue_id, batch.producer.first_sequence) for [batch] in store.attempts]
    assert sequences == [(0, 0), (0, 2), (1, 0), (0, 4)]
    assert len({batch.producer.producer_id for [batch] in store.attempts}) == 1


def test_two_producers_are_distinguished(make):
    store = FakeStore()
    for _ in range(2):
        make(store).send(Message("orders", b"x"))
    assert store.bodies(QUEUE) == [b"x", b"x"]


def test_a_batch_without_an_answer_is_never_sent_to_another_queue(make):
    """A batch that got no answer is never sent to another queue, because the first queue may already have its
    messages."""
    down, up = FakeStore("storage-a-0", [AWAY] * 5), FakeStore("storage-b-0")
    producer = make(down, up, route=topic_route(a=1, b=1))
    key = next(key for key in "abcdef" if abs(java_hash(key)) % 2 == 0)
    assert producer.send(Message("orders", b"x"), sharding_key=key).queue == QUEUE
    assert (down.everything(), up.everything()) == ([b"x"], [])


def test_a_send_that_times_out_has_an_unknown_outcome(make, clock):
    store = FakeStore(script=[("lost", AWAY), clock.passes(AWAY)])
    producer = make(store)
    with pytest.raises(SendUnknownError, match=r"1 message\(s\) to queue orders@a:0 .* 50 s.*restarting"):
        producer.send(Message("orders", b"x"), timeout_s=50)
    assert store.bodies(QUEUE) == [b"x"]  # the send failed with an unknown outcome, but the store has the message
    assert set(producer.test_routes.invalidated) == {"orders"}
    assert producer.send(Message("orders", b"y")).queue_offset == 1


def test_a_message_in_the_same_request_with_more_time_is_tried_on(make, clock):
    gate = Gate()
    store = FakeStore(script=[gate, *[AWAY] * 3])
    producer = make(store)
    first = producer.send_async(Message("orders", b"first"))
    assert gate.entered.wait(WAIT_S)
    [short] = handed_over(producer, messages(b"short"), {}, 1.0)
    patient = producer.send_async(Message("orders", b"patient"))
    expired = Gate(AWAY)
    store.script = [expired, *store.script]
    gate.opened.set()
    assert expired.entered.wait(WAIT_S)
    clock.now_s += 2.0  # the message's send timeout expires while the attempt is in flight
    assert not short.done()
    expired.opened.set()
    assert isinstance(short.exception(WAIT_S), SendUnknownError)
    assert patient.result(WAIT_S).queue_offset == 2
    assert first.result(WAIT_S).queue_offset == 0
    producer.flush(WAIT_S)


def test_a_message_whose_time_passed_before_it_was_ever_sent_was_not_stored(make):
    gate = Gate()
    store = FakeStore(script=[gate])
    producer = make(store)
    first = producer.send_async(Message("orders", b"first"))
    assert gate.entered.wait(WAIT_S)
    [late] = handed_over(producer, messages(b"late"), {}, 0.0)
    gate.opened.set()
    assert isinstance(late.exception(WAIT_S), ServiceNotAvailableError)
    assert "and is not stored" in str(late.exception())
    assert first.result(WAIT_S).queue_offset == 0
    assert store.everything() == [b"first"]


def test_a_refusal_fails_the_messages_it_concerns_and_no_others(make):
    refusal = MessageIllegalError("queue 1 is cursed")

    def refuse_queue_1(batches):
        return refusal if any(batch.queue_id == 1 for batch in batches) else None

    gate = Gate()
    store = FakeStore(script=[gate] + [refuse_queue_1] * 10)
    producer = make(store, route=topic_route(a=2))
    key = {java_hash(key) % 2: key for key in ("x", "y")}
    first = producer.send_async(Message("orders", b"0"), sharding_key=key[0])
    assert gate.entered.wait(WAIT_S)
    good = producer.send_async(Message("orders", b"good"), sharding_key=key[0])
    bad = producer.send_async(Message("orders", b"bad"), sharding_key=key[1])
    gate.opened.set()
    assert good.result(WAIT_S).queue_offset == 1
    assert bad.exception(WAIT_S).args == refusal.args
    assert first.result(WAIT_S)
    store.script.clear()
    assert producer.send(Message("orders", b"next"), sharding_key=key[1])
    assert store.everything() == [b"0", b"good", b"next"]


def test_a_store_that_takes_no_writes_fails_at_once(make):
    store = FakeStore(script=[StoreNotWritableError("the disk is full")])
    with pytest.raises(StoreNotWritableError, match="disk is full"):
        make(store).send(Message("orders", b"x"))
    assert len(store.attempts) == 1


def properties_of(size: int) -> dict[str, str]:
    return {f"p{number}": "x" * 1000 for number in range(size // 1000)}


@pytest.mark.parametrize("size", [40_000, 33_000])
def test_a_message_whose_properties_are_too_long_fails_alone(make, size):
    gate = Gate()
    producer = make(store := FakeStore(script=[gate]))
    futures = [producer.send_async(Message("orders", b"0"))]
    assert gate.entered.wait(WAIT_S)
    futures += [producer.send_async(message) for message in messages(b"1", b"2")]
    try:
        futures.append(producer.send_async(Message("orders", b"bad", properties=properties_of(size))))
        bad = futures.pop(3)
    except MessageIllegalError:
        bad = None
    futures.append(producer.send_async(Message("orders", b"3")))
    gate.opened.set()
    assert [result.queue_offset for result in results(futures)] == [0, 1, 2, 3]
    assert bad is None or isinstance(bad.exception(WAIT_S), MessageIllegalError)
    assert store.everything() == [b"0", b"1", b"2", b"3"]
    producer.flush(WAIT_S)


@pytest.mark.parametrize("spare", range(-120, 30, 6))
def test_at_the_edge_of_a_records_size_every_future_ends(make, spare):
    """Every future completes if a message has almost the maximum size. The sender adds properties, so a message may fit
    in a record without them, but not with them."""
    producer = make(FakeStore())
    name, value = "p", "x" * (32767 - 4 - spare - 60)
    try:
        futures = [producer.send_async(Message("orders", b"x", properties={name: value})) for _ in range(2)]
    except MessageIllegalError:
        futures = []
    assert not wait(futures, WAIT_S).not_done
    producer.flush(WAIT_S)


def test_nothing_of_a_batch_with_an_illegal_message_is_sent(make):
    producer = make(store := FakeStore())
    good = Message("orders", b"good")
    hasty = Message("orders", b"x", wait_store_msg_ok=False)
    for bad in ([], [good, "text"], [good, Message("other", b"x")], [good, hasty]):
        with pytest.raises(MessageIllegalError):
            producer.send_batch(bad)
    with pytest.raises(MessageIllegalError):
        producer.send_batch([good, Message("orders", b"bad", properties=properties_of(40_000)), good])
    producer.flush(WAIT_S)
    assert store.everything() == []


def test_messages_that_wait_for_the_disk_and_others_go_in_requests_of_their_own_and_in_order(make):
    gate = Gate()
    producer = make(store := FakeStore(script=[gate]))
    kinds = [True, True, False, False, True]
    first = producer.send_async(Message("orders", b"held"))
    gate.entered.wait(WAIT_S)
    futures = [
        producer.send_async(Message("orders", b"%d" % number, wait_store_msg_ok=waits))
        for number, waits in enumerate(kinds)
    ]
    gate.opened.set()
    results([first, *futures])
    sent = [(batch.wait_store_msg_ok, len(batch)) for [batch] in store.attempts[1:]]
    assert sent == [(True, 2), (False, 2), (True, 1)]
    assert store.everything() == [b"held", *(b"%d" % number for number in range(5))]


# Tests of sending a single message without a batch


def at_once(make, *stores, **settings) -> Producer:
    """Return a producer that sends a single message at once, because it has already found its stores."""
    producer = make(*stores, **settings)
    for store in stores:
        producer.send(Message("orders", b"first"), queue=MessageQueue("orders", store.name.split("-")[1], 0))
        store.attempts.clear()
    return producer


@pytest.mark.parametrize("where", [{}, {"sharding_key": "k"}, {"queue": QUEUE}])
def test_a_lone_message_is_not_sent_by_the_senders_thread_and_neither_is_a_batch(make, where):
    producer, threads = at_once(make, store := FakeStore()), []
    store.script = [lambda batches: threads.append(threading.current_thread())] * 4
    sent = [producer.send(Message("orders", b"%d" % number), **where).queue_offset for number in range(3)]
    sent += [result.queue_offset for result in producer.send_batch(messages(b"3", b"4"), **where)]
    assert sent == [1, 2, 3, 4, 5]
    assert len(threads) == 4
    assert not any(thread.name.startswith("producer-") for thread in threads)
    sequences = [batch.producer.first_sequence for [batch] in store.attempts]
    assert sequences == [1, 2, 3, 4]


@pytest.mark.parametrize("where", [{}, {"queue": QUEUE}])
@pytest.mark.parametrize("kind", [Message, SystemMessage])
def test_a_lone_message_with_properties_or_a_queue_is_no_batch(make, monkeypatch, where, kind):
    producer, queues = at_once(make, store := FakeStore()), set()
    # Single sends change to the next queue after some time. With a clock that stands still, they keep the same queue.
    monkeypatch.setattr(producer.pipeline.single_sends, "_clock", lambda: 0.0)
    queues.add(producer.send(kind("orders", b"which queue?", properties={"a": "b"}), **where).queue)
    monkeypatch.setattr(Sender, "send_at_once", lambda *arguments: pytest.fail("it went the general way"))
    for number in range(3):
        sent = producer.send(kind("orders", b"%d" % number, "t", properties={"a": str(number)}), **where)
        queues.add(sent.queue)
    assert len(queues) == 1
    assert store.everything()[-3:] == [b"0", b"1", b"2"]


def test_a_lone_message_of_a_user_is_checked_after_one_of_raymq_s_own(make):
    producer = at_once(make, FakeStore())
    producer.pipeline.single_sends._turns.clear()
    producer.send(SystemMessage("orders", b"own"), queue=QUEUE)
    assert producer.pipeline.single_sends._turns[QUEUE].checked is False
    producer.send(Message("orders", b"user's"), queue=QUEUE)
    assert producer.pipeline.single_sends._turns[QUEUE].checked is True


def test_a_batch_of_one_is_a_single_message_also_after_others(make):
    producer, gate = at_once(make, store := FakeStore()), Gate()
    store.script = [gate]
    before = [producer.send_async(Message("orders", b"a"))]
    assert gate.entered.wait(WAIT_S)
    before.append(producer.send_async(Message("orders", b"b")))
    threading.Timer(0.01, gate.opened.set).start()
    assert [result.queue_offset for result in producer.send_batch(messages(b"c"))] == [3]
    assert [result.queue_offset for result in results(before)] == [1, 2]


def test_a_single_message_does_not_overtake_others_of_its_queue(make):
    producer, gate = at_once(make, store := FakeStore()), Gate()
    store.script = [gate]
    before = [producer.send_async(Message("orders", b"a"), sharding_key="k")]
    assert gate.entered.wait(WAIT_S)
    before.append(producer.send_async(Message("orders", b"b"), sharding_key="k"))
    threading.Timer(0.01, gate.opened.set).start()
    assert producer.send(Message("orders", b"c"), sharding_key="k").queue_offset == 3
    assert store.everything() == [b"first", b"a", b"b", b"c"]
    assert [result.queue_offset for result in results(before)] == [1, 2]


@pytest.mark.parametrize("script", [[AWAY], [("lost", AWAY)], [LATE, ("lost", LATE), AWAY]])
def test_a_lone_message_without_an_answer_is_carried_on_by_the_sender_the_very_same_bytes(make, script):
    producer, threads = at_once(make, store := FakeStore()), []

    def noting(step):
        return lambda batches: threads.append(threading.current_thread().name) or step

    store.script = [noting(step) for step in [*script, None]]
    assert producer.send(Message("orders", b"x")).queue_offset == 1
    assert store.everything() == [b"first", b"x"]
    assert len({(bytes(batch.records), batch.producer) for [batch] in store.attempts}) == 1
    assert not threads[0].startswith("producer-")
    assert threads[1:] == ["producer-a"] * len(script)


def test_a_lone_message_that_is_refused_goes_to_another_broker(make):
    a, b = FakeStore("storage-a-0"), FakeStore("storage-b-0")
    producer = at_once(make, a, b, route=topic_route(a=1, b=1))
    producer.pipeline._turns._next["orders"] = 0
    producer.pipeline._turns._current.clear()
    a.script = [SystemBusyError("busy")]
    assert producer.send(Message("orders", b"x")).queue.broker_name == "b"
    assert (a.everything(), b.everything()) == ([b"first"], [b"first", b"x"])


def test_a_caller_that_is_interrupted_leaves_its_message_to_the_sender(make):
    producer = at_once(make, store := FakeStore())

    def interrupt(batches):
        raise KeyboardInterrupt

    store.script = [interrupt]
    with pytest.raises(KeyboardInterrupt):
        producer.send(Message("orders", b"x"))
    producer.flush(WAIT_S)
    assert store.everything() == [b"first", b"x"]
    assert len({bytes(batch.records) for [batch] in store.attempts}) == 1
    assert producer.send(Message("orders", b"y")).queue_offset == 2


def test_many_threads_that_send_lone_messages_lose_and_repeat_none(make):
    producer, offsets = make(store := FakeStore(), route=topic_route(a=2)), []

    def send() -> None:
        for _ in range(200):
            result = producer.send(Message("orders", b"%d" % threading.get_ident()))
            offsets.append((result.queue, result.queue_offset))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(set(offsets)) == len(offsets) == len(store.everything()) == 1200
    producer.flush(WAIT_S)


def test_a_busy_store_sets_the_time_of_the_retry(make, clock):
    producer, busy = make(store := FakeStore()), SystemBusyError("busy")
    busy.retry_after_s = 7.0
    store.script = [busy]
    future = producer.send_async(Message("orders", b"x"))
    sender = producer.pipeline._senders["a"]
    eventually(lambda: sender._resume_s == clock.now_s + 7.0, "the sender pauses")
    assert not future.done()
    clock.now_s += 7.0
    with producer.pipeline._lock:
        sender._wake.notify_all()
    assert future.result(WAIT_S).queue_offset == 0


# Tests of the limits of messages and of the buffer


def test_a_full_buffer_blocks_until_there_is_space(make):
    gate = Gate()
    producer = make(FakeStore(script=[gate]), max_buffered_bytes=2000)
    first = producer.send_async(Message("orders", b"x" * 1500))
    assert gate.entered.wait(WAIT_S)
    second: list[Future] = []
    thread = threading.Thread(target=lambda: second.append(producer.send_async(Message("orders", b"y" * 1500))))
    thread.start()
    assert not second
    gate.opened.set()
    thread.join(WAIT_S)
    assert [result.queue_offset for result in results([first, *second])] == [0, 1]


def test_a_buffer_that_stays_full_is_reported_and_nothing_is_sent(make):
    gate = Gate()
    producer = make(store := FakeStore(script=[gate]), max_buffered_bytes=2000)
    first = producer.send_async(Message("orders", b"x" * 1500))
    assert gate.entered.wait(WAIT_S)
    with pytest.raises(SystemBusyError, match=r"buffer of 2000 bytes .* stayed full for 0\.01 s"):
        producer.send(Message("orders", b"y" * 1500), timeout_s=0.01)
    gate.opened.set()
    first.result(WAIT_S)
    producer.flush(WAIT_S)
    assert store.everything() == [b"x" * 1500]


def test_properties_count_for_the_buffer_too(make):
    gate = Gate()
    producer = make(FakeStore(script=[gate]), max_buffered_bytes=2000)
    first = producer.send_async(Message("orders", b"x", properties={"p": "v" * 1500}))
    assert gate.entered.wait(WAIT_S)
    with pytest.raises(SystemBusyError):
        producer.send(Message("orders", b"x", properties={"p": "v" * 1500}), timeout_s=0.01)
    gate.opened.set()
    first.result(WAIT_S)


def test_one_message_larger_than_the_buffer_is_sent_alone(make):
    assert make(FakeStore(), max_buffered_bytes=10).send(Message("orders", b"x" * 5000)).queue_offset == 0


def test_a_request_has_a_bounded_size(make, monkeypatch):
    monkeypatch.setattr(send_batch, "REQUEST_MAX_BYTES", 1500)
    monkeypatch.setattr(send_batch, "BATCH_MAX_MESSAGES", 3)
    producer = make(store := FakeStore())
    producer.send_batch(messages(*[b"x" * 10] * 7))
    assert [len(batch) for [batch] in store.attempts] == [3, 3, 1]
    store.attempts.clear()
    producer.send_batch(messages(*[b"x" * 700] * 3))
    assert [len(batch) for [batch] in store.attempts] == [1, 1, 1]


# Tests of choosing the queue of a message


@pytest.mark.parametrize(("count", "most"), [(700, 512), (12_000, 4096)])
def test_a_burst_is_spread_over_the_queues_and_a_stream_has_ever_larger_batches(make, count, most):
    gate = Gate()
    producer = make(store := FakeStore(script=[gate]), route=topic_route(a=8))
    futures = [producer.send_async(Message("orders", b"first"), queue=QUEUE)]
    assert gate.entered.wait(WAIT_S)
    futures += [producer.send_async(Message("orders", b"x")) for _ in range(count)]
    gate.opened.set()
    results(futures)
    sizes = [len(batch) for batches in store.attempts[1:] for batch in batches]
    assert sum(sizes) == count
    assert most / 2 < max(sizes) <= most
    assert len(store.queues) > 1


def test_a_sharding_key_stays_with_its_queue(make):
    producer = make(FakeStore(), route=topic_route(a=8))
    for key in ("user-9", "user-10", "kunde-ä", ""):
        queues = {producer.send(Message("orders", b"x"), sharding_key=key).queue.queue_id for _ in range(5)}
        assert queues == {abs(java_hash(key)) % 8}


def test_a_topic_without_a_writable_queue_is_reported_and_costs_no_space(make):
    producer = make(FakeStore(), route=topic_route(a=0), max_buffered_bytes=1000)
    for _ in range(3):
        with pytest.raises(ServiceNotAvailableError, match="no writable queue"):
            producer.send(Message("orders", b"x" * 700), timeout_s=0.01)


# Tests of closing a producer, of producers that are never closed, and of garbage collection


@pytest.mark.parametrize("error", [ValueError("a bug"), MemoryError()])
def test_the_sender_thread_survives_a_bug_and_the_messages_concerned_fail(make, monkeypatch, error):
    producer = make(store := FakeStore())
    assert producer.send(Message("orders", b"0")).queue_offset == 0
    encode = producer.pipeline._context.encoder.encode

    def broken(queue, entries):
        raise error

    monkeypatch.setattr(producer.pipeline._context.encoder, "encode", broken)
    with pytest.raises(type(error)):
        producer.send(Message("orders", b"1"))
    monkeypatch.setattr(producer.pipeline._context.encoder, "encode", encode)
    assert producer.send(Message("orders", b"2")).queue_offset == 1
    assert store.everything() == [b"0", b"2"]
    producer.flush(WAIT_S)


def test_an_answer_that_makes_no_sense_fails_the_messages_and_not_the_thread(make, monkeypatch):
    producer = make(store := FakeStore())
    append = store.append
    monkeypatch.setattr(store, "append", lambda batches, timeout_s: [])
    with pytest.raises(SendUnknownError, match=r"ValueError.*(zip|unpack)"):
        producer.send(Message("orders", b"1"))
    monkeypatch.setattr(store, "append", append)
    assert producer.send(Message("orders", b"2"))
    producer.flush(WAIT_S)


def test_a_future_cannot_be_taken_back(make):
    gate = Gate()
    producer = make(FakeStore(script=[gate]))
    future = producer.send_async(Message("orders", b"x"))
    assert not future.cancel()
    gate.opened.set()
    assert future.result(WAIT_S).queue_offset == 0


def test_a_callback_that_fails_disturbs_nobody(make):
    producer = make(FakeStore())
    future = producer.send_async(Message("orders", b"x"))
    future.add_done_callback(lambda done: 1 / 0)
    assert producer.send(Message("orders", b"y"))


def test_flush_waits_for_everything_handed_over(make):
    gate = Gate()
    producer = make(store := FakeStore(script=[gate]))
    producer.send_oneway(Message("orders", b"x"))
    assert gate.entered.wait(WAIT_S)
    with pytest.raises(RequestTimeoutError, match="the flush of the producer"):
        producer.flush(0.01)
    gate.opened.set()
    producer.flush(WAIT_S)
    assert store.everything() == [b"x"]


def test_close_flushes_and_ends_the_threads(make):
    closed: list[Producer] = []
    store = FakeStore(script=[AWAY])
    with make(store, on_close=closed.append) as producer:
        futures = [producer.send_async(message) for message in messages(b"x", b"y")]
    assert all(future.done() for future in futures)
    assert store.everything() == [b"x", b"y"]
    assert closed == [producer]
    assert not producer.pipeline._senders["a"].alive
    producer.close()
    assert closed == [producer]
    with pytest.raises(ClientStateError, match="closed"):
        producer.send(Message("orders", b"z"))


def test_a_message_that_comes_while_the_producer_is_closed_is_refused_and_not_forgotten(make, monkeypatch):
    producer = make(FakeStore())
    producer.send(Message("orders", b"x"))
    select = producer.pipeline._turns.next

    def close_meanwhile(*arguments):
        producer.pipeline._senders["a"].close(give_up=False)
        return select(*arguments)

    monkeypatch.setattr(producer.pipeline._turns, "next", close_meanwhile)
    with pytest.raises(ClientStateError, match="closed"):
        producer.send_async(Message("orders", b"y"))
    producer.flush(WAIT_S)


def test_a_producer_cannot_be_pickled(make):
    with pytest.raises(TypeError, match="in the process that uses"):
        pickle.dumps(make(FakeStore()))


def test_bad_arguments_are_refused(make):
    producer = make(FakeStore())
    with pytest.raises(MessageIllegalError, match="got str"):
        producer.send("text")
    with pytest.raises(IllegalNameError, match="system topic"):
        producer.send(Message("rmq_sys_broker_state", b"x"))
    with pytest.raises(InvalidArgumentError):
        make(FakeStore(), send_timeout_s=0)
    with pytest.raises(IllegalNameError):
        Producer("a.b", routes=FakeRoutes(), storage=lambda name: None, born_host=("127.0.0.1", 0))


def test_nothing_of_a_batch_that_has_its_end_stays(make, clock):
    """Nothing of a completed batch stays in memory. raymq's messages and futures are excluded from the garbage
    collector, so it would never free a reference cycle through them."""
    store = FakeStore()
    producer = make(store, hooks=[NotingHook()])
    plain = make(store, send_timeout_s=5.0)
    plain.send(Message("orders", b"first"))

    def send_in_all_ways() -> None:
        store.script = [None, AWAY, None, clock.passes(AWAY), MessageIllegalError("cursed")]
        for sender in (producer, plain):
            futures = [sender.send_async(Message("orders", b"x", properties={"a": "b"})) for _ in range(300)]
            futures[0].add_done_callback(lambda done, futures=futures: futures)
            wait(futures, WAIT_S)
            for future in futures:
                with contextlib.suppress(RaymqError):
                    future.result(WAIT_S)
            for send in (sender.send, lambda message, sender=sender: sender.send_batch([message] * 3)):
                with contextlib.suppress(RaymqError):
                    send(Message("orders", b"y"))
            sender.flush(WAIT_S)

    def left() -> int:
        gc.collect()
        return sum(type(thing) in (Completion, send_batch.SendBatch, send_batch.Flight) for thing in gc.get_objects())

    send_in_all_ways()
    before = left()
    for _ in range(3):
        send_in_all_ways()
    assert left() <= before


class NotingHook:
    """Send hook that stores the arguments of its last call."""

    def before_send(self, context) -> None:
        self.context = context

    def after_send(self, context) -> None:
        self.context = context


# Tests of closing a producer from within its own callbacks


@pytest.mark.parametrize("closes", [1, 3])
def test_a_callback_of_a_send_may_close_the_producer_which_loses_nothing(make, closes):
    """A callback of a send may close the producer, and no message is lost. The close must not wait for the producer's
    threads, because one of them runs the callback."""
    gate = Gate()
    producer, raised = make(store := FakeStore(script=[None, gate])), []
    ended = []

    def close(future) -> None:
        try:
            for _ in range(closes):
                producer.close()
            ended.append(threading.current_thread().name)
        except BaseException as error:
            raised.append(error)

    first = producer.send_async(Message("orders", b"first"))
    first.result(WAIT_S)
    futures = [producer.send_async(Message("orders", b"%d" % number)) for number in range(3)]
    assert gate.entered.wait(WAIT_S)
    futures[0].add_done_callback(close)
    gate.opened.set()
    eventually(lambda: ended or raised, "the callback", WAIT_S)
    assert raised == []
    producer.close()
    assert [future.result(WAIT_S).queue_offset for future in futures] == [1, 2, 3]
    assert not any(sender.alive for sender in producer.pipeline._senders.values())
    assert store.everything() == [b"first", b"0", b"1", b"2"]
    with pytest.raises(ClientStateError, match="closed"):
        producer.send(Message("orders", b"late"))


def test_a_close_in_a_callback_at_the_exit_raises_no_error_although_no_thread_starts(make):
    gate, raised = Gate(), []
    producer = make(store := FakeStore(script=[gate]))
    future = producer.send_async(Message("orders", b"last"))
    assert gate.entered.wait(WAIT_S)

    def close(future) -> None:
        try:
            with no_thread_starts():
                producer.close()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    future.add_done_callback(close)
    gate.opened.set()
    eventually(lambda: raised, "the callback", WAIT_S)
    assert raised == [None]
    producer.close()  # the client's exit handler closes the producer
    assert store.everything() == [b"last"]
