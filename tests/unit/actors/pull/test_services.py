"""Tests of the Fetcher that all consumer instances of a Pull actor share. One Fetcher reads for all instances, but
keeps the queues of each instance separate."""

from __future__ import annotations

import pytest

from actors.pull import services as module
from actors.pull.services import InstanceQueue, SharedFetcher
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult

Q = MessageQueue("orders", "broker-a", 0)
RESULT = FetchResult(PullStatus.NO_NEW_MESSAGE, 5, 0, 5, b"", 0)


class Fetcher:
    """Fake Fetcher that counts its wake-ups."""

    def __init__(self, **functions) -> None:
        self.functions = functions
        self.woken = 0

    def wake_readers(self) -> None:
        self.woken += 1


class Instance:
    def __init__(self, name: str, offset: int) -> None:
        self.name, self.offset = name, offset
        self.looks = 0
        self.delivered: list[tuple[MessageQueue, int]] = []
        self.lost: list[tuple[MessageQueue, int]] = []

    def wanted(self, now_s):
        self.looks += 1
        return {InstanceQueue("orders", "broker-a", 0, self.name): self.offset}

    def assigned(self):
        return frozenset(self.wanted(0.0))

    def request(self, queue, offset) -> FetchRequest:
        return FetchRequest(queue.topic, queue.queue_id, offset, self.offset)

    def deliver(self, queue, offset, result) -> None:
        self.delivered.append((queue, offset))

    def lose(self, queue, offset, error) -> None:
        self.lost.append((queue, offset))


@pytest.fixture
def fetcher(monkeypatch) -> SharedFetcher:
    monkeypatch.setattr(module.Fetcher, "by_routes", lambda routes, storages, **functions: Fetcher(**functions))
    return SharedFetcher(None, None)


def calls(fetcher: SharedFetcher) -> dict:
    return fetcher._fetcher.functions


def test_two_instances_may_read_one_queue_at_different_offsets(fetcher):
    one, two = Instance("one", 5), Instance("two", 9)
    for instance in (one, two):
        fetcher.add(instance)
        fetcher.changed(instance)
    wanted = calls(fetcher)["wanted"]()
    assert sorted(wanted.values()) == [5, 9]
    assert calls(fetcher)["assigned"]() == wanted.keys()
    for queue, offset in wanted.items():
        assert calls(fetcher)["request"](queue, offset).max_messages == offset
        calls(fetcher)["deliver"](queue, offset, RESULT)
        calls(fetcher)["lost"](queue, offset, None)
    assert (one.delivered, two.delivered) == ([(Q, 5)], [(Q, 9)])
    assert (one.lost, two.lost) == ([(Q, 5)], [(Q, 9)])
    assert type(one.delivered[0][0]) is MessageQueue


def test_only_an_instance_that_has_changed_is_looked_at_again(fetcher):
    busy, idle = Instance("busy", 5), Instance("idle", 9)
    for instance in (busy, idle):
        fetcher.add(instance)
        fetcher.changed(instance)
    calls(fetcher)["wanted"]()
    before, busy.offset = idle.looks, 6
    fetcher.changed(busy)
    assert sorted(calls(fetcher)["wanted"]().values()) == [6, 9]
    assert idle.looks == before


def test_messages_for_an_ended_instance_are_dropped(fetcher):
    gone = Instance("gone", 5)
    fetcher.add(gone)
    fetcher.changed(gone)
    [queue] = calls(fetcher)["wanted"]()
    fetcher.remove(gone)
    assert calls(fetcher)["wanted"]() == {}
    calls(fetcher)["request"](queue, 5)
    calls(fetcher)["deliver"](queue, 5, RESULT)
    assert gone.delivered == []


def test_an_old_instance_does_not_end_a_new_instance_of_the_same_name(fetcher):
    before, after = Instance("same", 5), Instance("same", 7)
    fetcher.add(before)
    fetcher.add(after)
    fetcher.remove(before)
    fetcher.changed(after)
    assert list(calls(fetcher)["wanted"]().values()) == [7]
