"""Tests of client objects in a forked child process. The child's copy refuses every call at once, and the parent's
object keeps working."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest

from raymq.client.admin.admin import Admin
from raymq.client.admin.dead_letters import DeadLetters
from raymq.client.admin.namespaced import NamespacedCalls
from raymq.client.client import Client
from raymq.client.consumer.push.subscription import PushSubscription
from raymq.client.producer.producer import Producer
from raymq.common import closing
from raymq.common.closing import OfProcess, shared_lock
from raymq.common.identity import Identity, give_back, present, take
from raymq.common.message import Message
from raymq.remoting.lane.client import Lane
from raymq.serve.connection import TaskConnection
from tests.support.clients.fakes import FakeStore
from tests.support.clients.forks import in_child, outcome
from tests.support.clients.lanes import ECHO, echo_server
from tests.support.clients.producers import Gate, producers_of_fakes

FACTORIES = [name for name in vars(Client) if not name.startswith("_")]


def kinds() -> list[type[OfProcess]]:
    """Return the classes of all objects that a program gets from a Client, and of all objects that hold such an
    object."""
    from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer
    from raymq.client.consumer.pull.consumer import PullConsumer
    from raymq.client.consumer.push.consumer import PushConsumer
    from raymq.client.consumer.simple.async_consumer import AsyncSimpleConsumer
    from raymq.client.consumer.simple.consumer import SimpleConsumer
    from raymq.client.producer.async_producer import AsyncProducer
    from raymq.client.producer.repeatable.writer import RepeatableWriter
    from raymq.client.transactions.producer import TransactionProducer

    return [
        *(Client, Producer, AsyncProducer, TransactionProducer, RepeatableWriter, Admin, NamespacedCalls, DeadLetters),
        *(PullConsumer, AsyncPullConsumer, SimpleConsumer, AsyncSimpleConsumer, PushConsumer, PushSubscription),
        TaskConnection,
    ]


def test_every_object_that_a_client_makes_is_of_its_process() -> None:
    names = {kind.__name__ for kind in kinds()}
    made = set()
    for name in FACTORIES:
        member = inspect.getattr_static(Client, name)
        function = member.fget if isinstance(member, property) else member
        annotation = str(inspect.signature(function).return_annotation)
        if annotation[:1].isupper() and annotation not in ("Any", "TraceStatistics", "None"):
            made.add(annotation)
    assert made <= names, "a class that is not in the list of this test"
    assert len(made) >= 9


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_a_copy_refuses_every_attribute_and_may_be_closed(kind: type[OfProcess]) -> None:
    """In a forked process, every attribute access on a client object raises an error, except close(). The test does not
    run the object's __init__, so a check that first reads another attribute would fail."""
    item = kind.__new__(kind)
    public = [name for name in dir(kind) if not name.startswith("_") and name != "close"]
    maker = os.getpid()

    def use() -> list[str]:
        outcomes = [outcome(lambda name=name: getattr(item, name)) for name in [*public, "_lock", "_engine"]]
        if inspect.iscoroutinefunction(getattr(kind, "close", None)):
            asyncio.run(item.close())
        elif hasattr(kind, "close"):
            item.close()
        if hasattr(kind, "__exit__"):
            with item:
                pass
        assert isinstance(item, kind)
        return outcomes

    outcomes = in_child(use)
    assert len(outcomes) == len(public) + 2
    assert all(f"ClientStateError: this {kind.__name__} belongs to process {maker}" in one for one in outcomes)
    assert type(item) is kind, "the parent's object has changed"


def test_a_producer_of_the_parent_stores_nothing_from_its_child() -> None:
    store = FakeStore()
    with producers_of_fakes() as make:
        producer = make(store)
        producer.send(Message("orders", b"before"))
        # a method that was bound to the producer before the fork must also refuse to send in the child
        send = producer.send

        def use() -> list[str]:
            return [
                outcome(lambda: producer.send(Message("orders", b"child"), timeout_s=1)),
                outcome(lambda: send(Message("orders", b"child"))),
                outcome(lambda: producer.send_async(Message("orders", b"child"))),
                outcome(lambda: producer.flush(1.0)),
                outcome(producer.close),
            ]

        *refused, closed = in_child(use)
        assert all("ClientStateError: this Producer belongs to process" in one for one in refused)
        assert closed == "ok"
        for number in range(4):
            assert producer.send(Message("orders", b"%d" % number)).queue_offset == 1 + number
    assert store.everything() == [b"before", b"0", b"1", b"2", b"3"]


_producer: Producer | None = None


def _send_in_pool(number: int) -> str:
    assert _producer is not None
    return outcome(lambda: _producer.send(Message("orders", b"%d" % number)))


@pytest.mark.parametrize("kind", ["multiprocessing", "concurrent.futures"])
def test_a_pool_of_forks_gets_one_clear_error(kind: str) -> None:
    global _producer
    fork = multiprocessing.get_context("fork")
    store = FakeStore()
    with producers_of_fakes() as make:
        _producer = make(store)
        _producer.send(Message("orders", b"before"))
        if kind == "multiprocessing":
            with fork.Pool(4) as pool:
                outcomes = pool.map_async(_send_in_pool, range(8)).get(timeout=60)
        else:
            with ProcessPoolExecutor(4, mp_context=fork) as executor:
                outcomes = list(executor.map(_send_in_pool, range(8), timeout=60))
        _producer.send(Message("orders", b"after"))
    assert len(outcomes) == 8
    assert all("ClientStateError: this Producer belongs to process" in one for one in outcomes)
    assert store.everything() == [b"before", b"after"]


def test_a_new_producer_of_the_child_works() -> None:
    store = FakeStore()
    with producers_of_fakes() as make:
        make(store).send(Message("orders", b"of the parent"))

        def use() -> list[bytes]:
            with producers_of_fakes() as make_here:
                make_here(store).send(Message("orders", b"of the child"))
            return store.everything()

        assert in_child(use) == [b"of the parent", b"of the child"]


def test_a_send_under_way_in_the_parent_does_not_hang_the_child() -> None:
    gate = Gate()
    store = FakeStore(script=[gate])
    with producers_of_fakes() as make:
        producer = make(store)
        future = producer.send_async(Message("orders", b"x"))
        assert gate.entered.wait(60)
        refused = in_child(lambda: outcome(lambda: future.result(60)))
        assert "ClientStateError: this send belongs to process" in refused
        gate.opened.set()
        result = future.result(60)
        assert in_child(lambda: future.result(1)) == result, "an end that came before the fork can be read"


def test_a_lock_that_a_thread_of_the_parent_holds_is_free_in_the_child() -> None:
    lock = shared_lock()
    with lock:
        assert in_child(lambda: lock.acquire(timeout=5)) is True
        assert lock.locked()


def test_a_child_closes_its_copies_of_lanes_and_the_parent_keeps_its_own() -> None:
    server = echo_server()
    try:
        lane = Lane(server.address)
        assert bytes(lane.call(ECHO, (b"ping",), 5.0).payload) == b"ping"
        assert in_child(lambda: (lane.closed, lane.fileno())) == (True, -1)
        assert bytes(lane.call(ECHO, (b"ping",), 5.0).payload) == b"ping"
        lane.close()
    finally:
        server.close()


def test_a_child_acts_as_nobody() -> None:
    user = Identity("orders-team", b"k" * 32)
    take(user)
    try:
        assert in_child(lambda: present() is None) is True
        assert present() == user
    finally:
        give_back(user)


def test_an_object_of_a_child_is_refused_in_its_own_child() -> None:
    def grandchild() -> str:
        item = Producer.__new__(Producer)
        return in_child(lambda: outcome(lambda: item.send)) + f" | {os.getpid()}"

    refused, _, maker = in_child(grandchild).partition(" | ")
    assert f"ClientStateError: this Producer belongs to process {maker}," in refused


def test_threads_that_make_objects_while_others_fork_do_no_harm() -> None:
    stop = threading.Event()

    def make() -> None:
        while not stop.is_set():
            Admin.__new__(Admin)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        for _ in range(10):
            assert in_child(lambda: len(closing._objects)) == 0
    finally:
        stop.set()
        thread.join()
