"""Tests of how a consumer notifies its listeners that a topic's queues have changed. Only the last test lets the
watch's thread check for changes; the other tests call the check."""

from __future__ import annotations

import threading

import pytest

from raymq.client.consumer.queue_lookup import QueueWatch
from raymq.common.errors import ServiceNotAvailableError, TopicNotExistError
from raymq.common.message import MessageQueue
from tests.support.clients.fakes import WAIT_S

Q0, Q1 = MessageQueue("orders", "a", 0), MessageQueue("orders", "a", 1)


class Topics:
    """Fake NameServers that return the queues of topics, with a real watch (QueueWatch) on these queues. The tests call
    the watch's check themselves: with the default interval of an hour, the watch's thread makes no check during a test.
    """

    def __init__(self, interval_s: float = 3600.0) -> None:
        self.queues: dict[str, list[MessageQueue] | Exception] = {"orders": [Q0]}
        self.calls: list[tuple[str, list[MessageQueue]]] = []
        self.watch = QueueWatch(self.queues_of, interval_s, "watch")

    def queues_of(self, topic: str) -> list[MessageQueue]:
        answer = self.queues.get(topic, TopicNotExistError(topic))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def listen(self, topic: str, queues: list[MessageQueue]) -> None:
        self.calls.append((topic, queues))

    def check(self) -> None:
        for entry in self.watch._watched:
            self.watch._check(entry)


@pytest.fixture
def topics():
    topics = Topics()
    yield topics
    topics.watch.stop()


def test_a_change_is_reported_once(topics):
    topics.watch.register("orders", topics.listen)
    topics.check()
    assert topics.calls == []
    topics.queues["orders"] = [Q0, Q1]
    topics.check()
    topics.check()
    assert topics.calls == [("orders", [Q0, Q1])]
    topics.queues["orders"] = [Q1]
    topics.check()
    assert topics.calls[1:] == [("orders", [Q1])]


def test_a_watched_topic_must_exist_and_unknown_routes_are_not_reported(topics):
    with pytest.raises(TopicNotExistError):
        topics.watch.register("nothing", topics.listen)
    topics.watch.register("orders", topics.listen)
    for answer in (ServiceNotAvailableError("away"), TopicNotExistError("orders")):
        topics.queues["orders"] = answer
        topics.check()
    assert topics.calls == []
    topics.queues["orders"] = [Q1]
    topics.check()
    assert topics.calls == [("orders", [Q1])]


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), KeyboardInterrupt()])
def test_a_listener_that_fails_does_not_keep_the_next_from_being_called(topics, error):
    def fail(topic, queues):
        raise error

    topics.watch.register("orders", fail)
    topics.watch.register("orders", topics.listen)
    topics.queues["orders"] = [Q1]
    checking = threading.Thread(target=topics.check)
    checking.start()
    checking.join(WAIT_S)
    assert topics.calls == [("orders", [Q1])]


def test_after_stop_nothing_is_called(topics):
    topics.watch.register("orders", topics.listen)
    topics.queues["orders"] = [Q1]
    topics.watch.stop()
    topics.check()
    assert topics.calls == []


def test_one_thread_of_its_own_looks_and_calls():
    topics = Topics(interval_s=0.005)
    called = threading.Event()
    names = []

    def listen(topic, queues):
        names.append(threading.current_thread().name)
        called.set()

    topics.watch.register("orders", listen)
    topics.queues["orders"] = [Q1]
    assert called.wait(WAIT_S)
    topics.watch.stop()
    assert names == ["watch"]
    topics.watch._thread.join(WAIT_S)
    assert not topics.watch._thread.is_alive()
