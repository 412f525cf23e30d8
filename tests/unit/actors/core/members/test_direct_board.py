"""Tests of the board that hands requests with ``durable=False`` to the threads of listeners."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actors.core.members.direct_board import DirectBoard, DirectRequest, Worker
from raymq.common.errors import NoListenerError, SystemBusyError
from tests.support.cases import chaos_seed

ALL: dict[str, tuple[str, ...]] = {"prices": ()}

Board = DirectBoard[str]


def worker_of(board: Board, instance: str = "a", topics: dict[str, tuple[str, ...]] | None = None) -> Worker[str]:
    """Return a worker that waits at the board."""
    worker: Worker[str] = Worker()
    assert board.wait(worker, ("g", instance), topics or ALL) is None
    return worker


def put(board: Board, owner: str, tags: str | None = None, request: bytes = b"?") -> Any:
    return board.put("prices", tags, request, owner)


def answer(board: Board, worker: Worker[str], topics: dict[str, tuple[str, ...]] | None = None) -> Any:
    """End the worker's request, and let the worker wait again. Returns the worker's next request."""
    assert worker.running is not None
    assert board.finish(worker, worker.running.ticket) is not None
    return board.wait(worker, worker.instance, topics or ALL)


def test_instances_take_turns_and_the_last_worker_of_an_instance_is_the_next() -> None:
    board = Board()
    first, second = worker_of(board, "a"), worker_of(board, "a")
    third = worker_of(board, "b")
    assert [put(board, str(n))[1] for n in range(3)] == [second, third, first]
    for worker in (first, second, third):
        assert answer(board, worker) is None
    assert [put(board, str(n))[1] for n in range(2)] == [third, second]
    assert board.workers == 3
    assert board.open == 2


def test_a_request_waits_for_a_busy_listener_and_goes_to_the_worker_that_is_free_first() -> None:
    board = Board()
    worker = worker_of(board)
    put(board, "first")
    waiting = [put(board, str(n), request=b"?" * 10)[0] for n in range(3)]
    assert board.waiting_bytes == 30
    assert board.withdraw(waiting[1])
    assert not board.withdraw(waiting[1])
    assert answer(board, worker) is waiting[0]
    assert answer(board, worker) is waiting[2]
    assert answer(board, worker) is None
    assert (board.open, board.waiting_bytes) == (0, 0)


def test_a_request_is_refused_if_no_listener_wants_its_topic_and_tag() -> None:
    board = Board()
    worker = worker_of(board, topics={"prices": ("A", "B"), "orders": ()})
    for topic, tags in (("prices", None), ("prices", "C"), ("bills", "A")):
        with pytest.raises(NoListenerError):
            board.put(topic, tags, b"?", "r")
    assert board.put("prices", "A", b"?", "r")[1] is worker
    assert board.put("orders", None, b"?", "r")[1] is None
    board.leave(worker)
    with pytest.raises(NoListenerError, match="request_threads=1"):
        board.put("prices", "A", b"?", "r")


def test_a_waiting_request_goes_only_to_a_worker_that_wants_its_tag() -> None:
    board = Board()
    a, b = worker_of(board, "a", {"prices": ("A",)}), worker_of(board, "b", {"prices": ("B",)})
    for tag in "ABBA":
        put(board, tag, tag)
    assert answer(board, a, {"prices": ("A",)}).owner == "A"
    assert answer(board, b, {"prices": ("B",)}).owner == "B"
    assert answer(board, b, {"prices": ("B",)}) is None


def test_the_number_of_open_requests_and_the_bytes_of_waiting_ones_are_bounded() -> None:
    board = Board(most=3, most_bytes=10)
    worker = worker_of(board)
    put(board, "runs", request=b"?" * 100)
    put(board, "a lone request may be larger", request=b"?" * 11)
    with pytest.raises(SystemBusyError, match="11 bytes of requests"):
        put(board, "r", request=b"?")
    assert answer(board, worker).owner == "a lone request may be larger"
    put(board, "r", request=b"?" * 5)
    put(board, "r", request=b"?" * 5)
    with pytest.raises(SystemBusyError, match="3 requests with durable=False are open"):
        put(board, "r", request=b"")


def test_the_request_of_a_worker_that_ends_is_returned_and_its_late_answer_is_dropped() -> None:
    board = Board()
    worker = worker_of(board)
    one, chosen = put(board, "r")
    assert chosen is worker
    assert board.finish(worker, one.ticket + 1) is None
    assert board.leave(worker) == (one, [])
    assert board.leave(worker) == (None, [])
    assert board.finish(worker, one.ticket) is None
    assert (board.open, board.workers) == (0, 0)


def test_the_last_worker_takes_along_the_requests_that_nobody_else_wants() -> None:
    board = Board()
    a, b = worker_of(board, "a", {"prices": ("A",)}), worker_of(board, "b", {"prices": ("A", "B")})
    for owner in ("runs at b", "runs at a"):
        put(board, owner, "A")
    waits = [put(board, tags, tags)[0] for tags in ("A", "B", "A")]
    assert board.leave(b)[1] == [waits[1]]
    assert board.leave(a)[1] == [waits[0], waits[2]]
    assert (board.open, board.waiting_bytes) == (0, 0)


def test_a_worker_may_change_its_topics() -> None:
    board = Board()
    worker = worker_of(board)
    assert board.stop_waiting(worker)
    assert not board.stop_waiting(worker)
    assert board.wait(worker, ("g", "a"), {"orders": ()}) is None
    with pytest.raises(NoListenerError):
        put(board, "r")
    assert board.put("orders", None, b"?", "r")[1] is worker
    assert board.workers == 1


WANTS: list[dict[str, tuple[str, ...]]] = [{"prices": ()}, {"prices": ("A",)}, {"prices": ("A", "B"), "orders": ()}]


class Model:
    """Random calls of a board, and a plain record of what must be true after them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.board = chance, Board(most=20, most_bytes=60)
        self.workers: list[Worker[str]] = []
        self.waiting: dict[int, DirectRequest[str]] = {}
        self.running: dict[Worker[str], DirectRequest[str]] = {}

    def step(self) -> None:
        what = self.chance.choice([self.join, *[self.put] * 4, *[self.answer] * 4, self.withdraw, self.leave])
        what()
        assert self.board.open == len(self.waiting) + len(self.running)
        assert self.board.waiting_bytes == sum(len(one.request) for one in self.waiting.values())
        assert self.board.workers == len(self.workers)

    def join(self) -> None:
        number = self.chance.randrange(len(WANTS))
        worker: Worker[str] = Worker()
        self.workers.append(worker)
        self.take(worker, self.board.wait(worker, ("g", str(number)), WANTS[number]))

    def put(self) -> None:
        topic, tags = self.chance.choice(["prices", "orders"]), self.chance.choice([None, "A", "B"])
        fitting = [worker for worker in self.workers if topic in worker.topics and wants(worker, topic, tags)]
        try:
            one, chosen = self.board.put(topic, tags, b"?" * self.chance.randrange(20), "")
        except NoListenerError:
            assert not fitting
            return
        except SystemBusyError:
            assert fitting
            return
        assert fitting
        if chosen is None:
            assert all(worker in self.running for worker in fitting)
            self.waiting[one.ticket] = one
        else:
            self.give(one, chosen)

    def answer(self) -> None:
        if self.running:
            worker = self.chance.choice(list(self.running))
            one = self.running.pop(worker)
            assert self.board.finish(worker, one.ticket) is one
            self.take(worker, self.board.wait(worker, worker.instance, worker.topics))

    def withdraw(self) -> None:
        if self.waiting:
            assert self.board.withdraw(self.waiting.pop(self.chance.choice(list(self.waiting))))

    def leave(self) -> None:
        if self.workers:
            worker = self.workers.pop(self.chance.randrange(len(self.workers)))
            one, left = self.board.leave(worker)
            assert one is self.running.pop(worker, None)
            for other in left:
                assert self.waiting.pop(other.ticket) is other
            assert all(
                any(other.topic in one.topics and wants(one, other.topic, other.tags) for one in self.workers)
                for other in self.waiting.values()
            )

    def take(self, worker: Worker[str], one: DirectRequest[str] | None) -> None:
        """Check what a worker got that began to wait."""
        fitting = [
            ticket
            for ticket, other in self.waiting.items()
            if other.topic in worker.topics and wants(worker, other.topic, other.tags)
        ]
        assert (None if one is None else one.ticket) == min(fitting, default=None)
        if one is not None:
            self.give(self.waiting.pop(one.ticket), worker)

    def give(self, one: DirectRequest[str], worker: Worker[str]) -> None:
        assert worker not in self.running
        assert worker.running is one
        assert wants(worker, one.topic, one.tags)
        self.running[worker] = one


def wants(worker: Worker[str], topic: str, tags: str | None) -> bool:
    return not worker.topics[topic] or tags in worker.topics[topic]


def test_each_request_goes_to_one_worker_that_wants_it_and_none_is_forgotten() -> None:
    chance = random.Random(chaos_seed())
    for _ in range(30):
        model = Model(chance)
        for _ in range(200):
            model.step()
