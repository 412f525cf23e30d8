"""Tests of put hooks and consume hooks in a real store: their arguments, how they refuse messages, and their
failures."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from raymq.common.delay import SCHEDULE_TOPIC
from raymq.common.errors import ConfigError, MessageRefusedError, SystemBusyError
from raymq.common.message import Message
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.compression import Compression
from raymq.records.format.encode import EncodedBatch, ProducerSequence, WaitingBatch, encode_batch
from raymq.records.format.inner_batch_encode import encode_inner_batch
from raymq.records.hooks import FetchedBatch, PutBatch
from tests.support.history.waiting import eventually
from tests.support.stores.stores import bodies_of, make_batch, open_store

MODULE = "hooks_of_the_test"
BORN = {"born_host": ("127.0.0.1", 5000), "born_timestamp_ms": 1_700_000_000_000}


@pytest.fixture
def hooks(monkeypatch) -> Iterator[Any]:
    """Yield an importable module named MODULE. Tests add hook functions to it."""
    module = ModuleType(MODULE)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


@pytest.fixture
def opened(tmp_path):
    """Yield a function that opens a store with the given settings. The fixture closes all stores after the
    test."""
    stores = []

    def opened(**settings):
        stores.append(open_store(tmp_path / f"store-{len(stores)}", **{"hook_timeout_ms": 60_000, **settings}))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def figures(store, setting="put_hooks"):
    [found] = [one for one in store.status().hooks if one.setting == setting]
    return found


def waiting_batch(*topics: str) -> EncodedBatch:
    """Return a batch of delayed messages of delay level 3, one for queue 5 of each topic. The bodies are 0, 1, 2 and so
    on."""
    return encode_batch(
        [Message(topic, b"%d" % index, delay_level=3) for index, topic in enumerate(topics)],
        2,
        message_ids=[f"{index:032X}" for index in range(len(topics))],
        waiting=WaitingBatch(SCHEDULE_TOPIC, [5] * len(topics)),
        **BORN,
    )


def test_a_put_hook_sees_each_batch_as_messages_and_columns(hooks, opened):
    seen: list[PutBatch] = []
    hooks.see = seen.append
    store = opened(put_hooks=[f"{MODULE}:see"])
    store.append([make_batch([b"one", b"two"], tags="red", producer=("p-1", 0, 0)), make_batch([b"three"], queue_id=3)])
    first, second = seen
    assert (first.broker_name, first.topic, first.queue_id, len(first)) == ("broker-a", "orders", 0, 2)
    assert (first.producer_id, second.producer_id, second.queue_id) == ("p-1", "", 3)
    assert [(message.body, message.tags, message.message_id) for message in first.messages] == [
        (b"one", "red", "0" * 32),
        (b"two", "red", f"{1:032X}"),
    ]
    assert first.columns(["body", "tags"]).to_pydict() == {"body": [b"one", b"two"], "tags": ["red", "red"]}
    assert first.size_bytes > len(b"onetwo")
    assert bodies_of(store) == [b"one", b"two"]
    assert figures(store)[:6] == (f"{MODULE}:see", "put_hooks", 2, 0, 0, 0)


def test_a_refused_message_is_an_error_with_the_reason_and_nothing_of_its_request_is_stored(hooks, opened):
    def refuse_secrets(batch: PutBatch) -> None:
        for index, message in enumerate(batch.messages):
            if b"secret" in message.body:
                batch.refuse(index, f"message {index} has a secret in it")

    hooks.refuse_secrets = refuse_secrets
    store = opened(put_hooks=[f"{MODULE}:refuse_secrets"])
    with pytest.raises(MessageRefusedError) as caught:
        store.append([make_batch([b"fine"], queue_id=1), make_batch([b"fine", b"secret", b"secret"])])
    assert (caught.value.hook, caught.value.topic) == (f"{MODULE}:refuse_secrets", "orders")
    assert caught.value.reason == "message 1 has a secret in it"
    assert (bodies_of(store), bodies_of(store, queue_id=1)) == ([], [])
    store.append([make_batch([b"fine"])])
    assert bodies_of(store) == [b"fine"]
    assert figures(store).refused == 2
    assert store.statistics().runtime["putMessageFailedTimes"] == "1"


def test_hooks_are_called_in_order_and_the_first_that_refuses_decides(hooks, opened):
    called = []
    hooks.first = lambda batch: called.append("first")
    hooks.second = lambda batch: (called.append("second"), batch.refuse(0, "by the second"))
    hooks.third = lambda batch: called.append("third")
    store = opened(put_hooks=[f"{MODULE}:{name}" for name in ("first", "second", "third")])
    with pytest.raises(MessageRefusedError, match="by the second"):
        store.append([make_batch([b"one"])])
    assert called == ["first", "second"]


def test_a_hook_that_raises_changes_nothing_unless_it_must_succeed(hooks, opened, caplog):
    def broken(batch: PutBatch) -> None:
        batch.refuse(0, "said before it broke")
        raise KeyError("a bug of the operator")

    hooks.broken = broken
    store = opened(put_hooks=[f"{MODULE}:broken"])
    for _ in range(3):
        store.append([make_batch([b"stored"])])
    assert len(bodies_of(store)) == 3
    assert figures(store).failed == 3
    assert [one.levelname for one in caplog.records if "KeyError" in one.getMessage()] == ["ERROR"]
    strict = opened(put_hooks=[f"{MODULE}:broken"], put_hooks_must_succeed=True)
    with pytest.raises(SystemBusyError, match="nothing was stored"):
        strict.append([make_batch([b"not stored"])])
    assert bodies_of(strict) == []


def test_a_hook_that_times_out_is_not_called_until_its_call_has_ended(hooks, opened):
    goes_on, calls = threading.Event(), []

    def slow(batch: PutBatch) -> None:
        calls.append(batch.messages[0].body)
        goes_on.wait(60)

    hooks.slow = slow
    store = opened(put_hooks=[f"{MODULE}:slow"], hook_timeout_ms=20)
    try:
        for body in (b"one", b"two", b"three"):
            store.append([make_batch([body])])
        assert bodies_of(store) == [b"one", b"two", b"three"]
        assert (figures(store).failed, figures(store).skipped) == (1, 2)
        assert calls == [b"one"]
    finally:
        goes_on.set()

    def is_called_again() -> bool:
        store.append([make_batch([b"again"])])
        return b"again" in calls

    eventually(is_called_again, "the hook is called again")


def test_delayed_messages_are_seen_with_the_topic_that_they_were_sent_to(hooks, opened):
    seen: list[tuple[str, int, list[tuple[str, bytes]]]] = []
    hooks.see = lambda batch: seen.append(
        (batch.topic, batch.queue_id, [(message.topic, message.body) for message in batch.messages])
    )
    columns: list[Any] = []
    hooks.columns = lambda batch: columns.append(batch.columns(["topic", "queue_id"]).to_pydict())
    store = opened(put_hooks=[f"{MODULE}:see", f"{MODULE}:columns"])
    store.append([waiting_batch("bills", "bills", "orders")])
    assert seen == [
        ("bills", 5, [("bills", b"0"), ("bills", b"1")]),
        ("orders", 5, [("orders", b"2")]),
    ]
    assert columns[0] == {"topic": ["bills", "bills"], "queue_id": [5, 5]}


def test_the_servers_own_topics_are_not_shown(hooks, opened):
    seen: list[PutBatch] = []
    hooks.see = seen.append
    store = opened(put_hooks=[f"{MODULE}:see"])
    store.append([make_batch([b"state"], topic="rmq_sys_broker_state")])
    assert seen == []
    store.append([make_batch([b"again"], topic="%RETRY%group")])
    assert [batch.topic for batch in seen] == ["%RETRY%group"]


def test_the_messages_of_an_inner_batch_are_seen_each(hooks, opened):
    seen: list[list[bytes]] = []
    hooks.see = lambda batch: seen.append([len(batch), *(message.body for message in batch.messages)])
    store = opened(put_hooks=[f"{MODULE}:see"])
    messages = [Message("batched", b"one"), Message("batched", b"two")]
    batch = encode_inner_batch(
        messages,
        0,
        message_ids=["0" * 32, f"{1:032X}"],
        producer=ProducerSequence("p", 0, 0),
        compression=Compression(),
        **BORN,
    )
    store.append([batch])
    assert seen == [[2, b"one", b"two"]]


def test_a_consume_hook_receives_fetched_messages_once(hooks, opened):
    seen: list[FetchedBatch] = []
    hooks.see = seen.append
    store = opened(consume_hooks=[f"{MODULE}:see"])
    store.append([make_batch([b"one", b"two", b"three"])])
    store.append([make_batch([b"state"], topic="rmq_sys_broker_state")])
    for request in (FetchRequest("orders", 0, 1, 10), FetchRequest("orders", 0, 3, 10)):
        store.fetch([request, FetchRequest("rmq_sys_broker_state", 0, 0, 1)], max_bytes=1 << 20, wait_s=0)
    store.fetch([FetchRequest("orders", 0, 0, 10)], max_bytes=0, wait_s=0)
    [batch] = seen
    assert (batch.topic, batch.queue_id, batch.queue_offset, batch.next_offset) == ("orders", 0, 1, 3)
    assert [message.body for message in batch.messages] == [b"two", b"three"]
    assert batch.columns(["queue_offset"]).to_pydict() == {"queue_offset": [1, 2]}
    assert figures(store, "consume_hooks").batches == 1


def test_a_consume_hook_that_fails_changes_nothing(hooks, opened):
    def broken(batch: FetchedBatch) -> None:
        raise RuntimeError("a bug")

    hooks.broken = broken
    store = opened(consume_hooks=[f"{MODULE}:broken"])
    store.append([make_batch([b"one"])])
    assert bodies_of(store) == [b"one"]
    assert figures(store, "consume_hooks").failed == 1


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_package.hooks:check", "cannot be imported in the store's process"),
        (f"{MODULE}:missing", "has no 'missing'"),
        (f"{MODULE}:number", "cannot be called"),
        (f"{MODULE}:NeedsMore", "creating an instance of this class failed"),
    ],
)
def test_a_wrong_path_is_refused_when_the_store_opens(hooks, opened, path, reason):
    class NeedsMore:
        def __init__(self, more):
            raise AssertionError(more)

    hooks.number, hooks.NeedsMore = 5, NeedsMore
    with pytest.raises(ConfigError, match=reason) as caught:
        opened(put_hooks=[path])
    assert path in str(caught.value)
    assert "store.put_hooks" in str(caught.value)
    opened()  # The store's directory is unlocked again after the failed opening.


def test_a_class_is_made_once(hooks, opened):
    class Counts:
        made = 0

        def __init__(self):
            Counts.made += 1
            self.seen = 0

        def __call__(self, batch):
            self.seen += len(batch)
            if self.seen > 2:
                batch.refuse(0, f"{self.seen} seen")

    hooks.Counts = Counts
    store = opened(put_hooks=[f"{MODULE}:Counts"])
    store.append([make_batch([b"one", b"two"])])
    with pytest.raises(MessageRefusedError, match="3 seen"):
        store.append([make_batch([b"three"])])
    assert Counts.made == 1


def test_a_store_without_hooks_has_none_on_its_ways(opened):
    store = opened()
    appends = store.append.__self__
    assert appends.write == appends._write_checked
    assert store.fetch == store.fetches.fetch
    assert store.status().hooks == ()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hook-")]


def test_the_threads_of_hooks_end_with_the_store(hooks, opened):
    hooks.see = lambda batch: None
    store = opened(put_hooks=[f"{MODULE}:see"])
    store.append([make_batch([b"one"])])
    store.close()
    eventually(
        lambda: not [one for one in threading.enumerate() if one.name == f"hook-{MODULE}:see"], "the thread ends"
    )


def test_a_refusal_needs_a_message_and_a_reason():
    batch = PutBatch("broker-a", "orders", 0, bytes(make_batch([b"one"]).records))
    with pytest.raises(ValueError, match="message 1 does not exist"):
        batch.refuse(1, "why")
    with pytest.raises(ValueError, match="must pass a reason"):
        batch.refuse(0, " ")
