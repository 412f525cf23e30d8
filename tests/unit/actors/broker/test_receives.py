"""Tests of receive calls at a broker. The broker answers at once or after a long poll, ends expired calls in time, and
limits the number of waiting calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from actors.broker.pop import receives as module
from actors.broker.pop.queue_ends import TopicQueue
from actors.broker.pop.receives import Receives
from actors.broker.state_log import StateLog
from actors.core.broker.state import BrokerState
from actors.core.pop.settle import decide_ack, decide_invisible
from actors.core.pop.waiting import ENDED_DEADLINES_MAX
from raymq.common.errors import (
    GroupNotExistError,
    InvalidArgumentError,
    NoPermissionError,
    ServiceNotAvailableError,
    TopicNotExistError,
)
from raymq.common.protocol.group import GroupConfig
from raymq.common.protocol.pop import LeasePart, ReceiveAnswer, ReceiveRequest
from raymq.common.protocol.store import QueueEnds
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually
from tests.unit.actors.broker.test_state_log import CallGate, Sender, Store

QUEUE = ("orders", 0)
LONG_S = 30.0


class Ends:
    """Fake source of the end offsets of queues. It reports an end offset on request, or when the offset
    changes."""

    def __init__(self) -> None:
        self.there: dict[TopicQueue, QueueEnds] = {}
        self.known: dict[TopicQueue, QueueEnds] = {}
        self.silent = False
        self.asks: list[float] = []
        self._asked: list[TopicQueue] = []
        self._at_once = False
        self.descriptor = -1

    @property
    def is_asking(self) -> bool:
        return bool(self._asked)

    def next_look_s(self) -> float:
        return time.monotonic() + 0.01 if self._asked else 0.0

    def ask(self, queues: list[TopicQueue], wait_s: float) -> bool:
        self.asks.append(wait_s)
        self._asked, self._at_once = queues, not wait_s
        return True

    def take_answer(self, *, readable: bool) -> bool:
        now = {queue: self.there.get(queue, QueueEnds(0, 0)) for queue in self._asked}
        if self.silent or not (self._at_once or any(self.known.get(queue) != end for queue, end in now.items())):
            return False
        self.known |= now
        self._asked = []
        return True

    def close(self) -> None:
        self._asked = []


class Broker:
    """A fake broker that offers only the calls of a POP receive. Its store keeps state records."""

    def __init__(self, ends: Any = None) -> None:
        self.ends = ends or Ends()
        store = Store("storage-broker-a-0")
        self.sender = Sender(store)
        self.log = StateLog("broker-a", store, self.sender)  # type: ignore[arg-type]  # a fake
        self.log.load()
        self.receives = Receives(self.log, self.ends)
        self.log.change(lambda state: state.decide_topic("orders", 1, 1))
        self.log.change(lambda state: state.decide_group("g"))

    def receive(self, most: int = 10, wait_s: float = 0.0, invisible_ms: int = 60_000, **more: Any) -> Future[Any]:
        return self.begin(most, wait_s, invisible_ms, **more)[0]

    def begin(
        self, most: int = 10, wait_s: float = 0.0, invisible_ms: int = 60_000, **more: Any
    ) -> tuple[Future[Any], Callable[[], None]]:
        """Begin a receive. Returns its answer, and the function that says that nobody waits for the answer any
        more."""
        future: Future[ReceiveAnswer] = Future()
        request = ReceiveRequest("g", ("orders",), most, invisible_ms, wait_s, **more)
        return future, self.receives.submit(request, future.set_result, future.set_exception)

    def send(self, count: int) -> None:
        end = self.ends.there.get(QUEUE, QueueEnds(0, 0)).max_offset
        self.ends.there[QUEUE] = QueueEnds(0, end + count)

    def settle(self, given: Any, invisible_ms: int | None = None) -> None:
        parts = [LeasePart(given.topic, given.queue_id, given.start, given.pop_ms)]

        def decide(state: BrokerState) -> Any:
            committed = partial(state.committed, "g")
            if invisible_ms is None:
                return decide_ack(state.pop, committed, "g", parts).change
            now_ms = time.time_ns() // 1_000_000
            return decide_invisible(state.pop, committed, "g", parts, invisible_ms, now_ms).change

        self.log.change(decide)
        self.receives.look_again()


@pytest.fixture
def broker() -> Iterator[Broker]:
    broker = Broker()
    yield broker
    broker.receives.close()
    broker.log.close()


def spans(answer: ReceiveAnswer) -> list[tuple[int, int]]:
    return [(given.start, given.count) for given in answer.ranges]


def test_a_forbidden_topic_fails_new_and_waiting_receives(broker: Broker) -> None:
    waiting = broker.receive(1, wait_s=LONG_S)
    eventually(lambda: broker.ends.asks[-1:] == [module.ASK_WAIT_S], "the question behind which it waits")
    broker.log.change(lambda state: state.decide_forbid("g", "orders", forbidden=True))
    with pytest.raises(NoPermissionError, match="'g' is forbidden to read topic 'orders'"):
        broker.receive(1)
    broker.send(1)
    with pytest.raises(NoPermissionError, match="forbidden"):
        waiting.result(WAIT_S)
    broker.log.change(lambda state: state.decide_forbid("g", "orders", forbidden=False))
    assert spans(broker.receive(1).result(WAIT_S)) == [(0, 1)]


def test_messages_that_are_there_are_handed_out_after_one_look(broker: Broker) -> None:
    broker.send(25)
    assert spans(broker.receive(10).result(WAIT_S)) == [(0, 10)]
    asked = len(broker.ends.asks)
    assert spans(broker.receive(10).result(WAIT_S)) == [(10, 10)], "and what is known to be there, without one"
    assert len(broker.ends.asks) == asked
    assert spans(broker.receive(10).result(WAIT_S)) == [(20, 5)]
    assert broker.receive(10).result(WAIT_S).ranges == ()


def test_a_new_message_wakes_a_waiting_receive(broker: Broker) -> None:
    waiting = [broker.receive(1, wait_s=LONG_S) for _ in range(3)]
    eventually(lambda: broker.ends.asks[-1:] == [module.ASK_WAIT_S], "the question behind which all wait")
    broker.send(1)
    assert spans(waiting[0].result(WAIT_S)) == [(0, 1)]
    assert [one.done() for one in waiting[1:]] == [False, False]
    broker.send(2)
    assert [spans(one.result(WAIT_S)) for one in waiting[1:]] == [[(1, 1)], [(2, 1)]]


def test_an_expired_lease_wakes_a_waiting_receive(broker: Broker) -> None:
    broker.send(2)
    broker.receive(2, invisible_ms=200).result(WAIT_S)
    [again] = broker.receive(2, wait_s=LONG_S).result(WAIT_S).ranges
    assert (again.start, again.count, again.attempts) == (0, 2, 2)


@pytest.mark.parametrize("of_group", [None, True, False])
@pytest.mark.parametrize("fifo", [True, False])
def test_a_receive_that_does_not_choose_its_mode_gets_it_from_the_group_or_the_topics_type(
    broker: Broker, fifo: bool, of_group: bool | None
) -> None:
    if fifo:
        attributes = {"message.type": "FIFO"}
        broker.log.change(lambda state: state.decide_topic_update("orders", None, None, None, "", attributes))
    broker.log.change(
        lambda state: state.decide_group_config(GroupConfig("g", ordered=of_group, retry_intervals_s=(5,)))
    )
    broker.send(4)
    expected = fifo if of_group is None else of_group
    first = broker.receive(2).result(WAIT_S)
    assert spans(first) == [(0, 2)]
    assert first.retry_intervals_s == (5.0,)
    assert first.ordered_topics == (("orders", "%RETRY%g") if of_group else ("orders",) if expected else ())
    assert spans(broker.receive(1).result(WAIT_S)) == ([] if expected else [(2, 1)])
    chosen = broker.receive(1, ordered=False).result(WAIT_S)
    assert (spans(chosen), chosen.ordered_topics) == ([(2 if expected else 3, 1)], ())
    assert spans(broker.receive(1, ordered=True).result(WAIT_S)) == []


@pytest.mark.parametrize("kind", ["PRIORITY", "NORMAL"])
def test_a_priority_topic_is_read_from_its_highest_level_and_each_level_gets_its_turn(
    broker: Broker, kind: str
) -> None:
    attributes = {"message.type": kind}
    broker.log.change(lambda state: state.decide_topic_update("orders", 10, None, None, attributes=attributes))
    broker.ends.there = {("orders", level): QueueEnds(0, 1000) for level in range(10)}
    firsts = []
    for _ in range(36):
        [given] = broker.receive(4).result(WAIT_S).ranges
        firsts.append(given.queue_id)
    assert (firsts.count(9) == 27) is (kind == "PRIORITY")
    if kind == "PRIORITY":
        assert sorted(firsts) == [*range(9), *[9] * 27]


def test_a_known_backlog_does_not_hide_new_messages_of_a_higher_level(broker: Broker) -> None:
    attributes = {"message.type": "PRIORITY"}
    broker.log.change(lambda state: state.decide_topic_update("orders", 10, None, None, attributes=attributes))
    broker.ends.there = {("orders", 0): QueueEnds(0, 1000)}
    assert {broker.receive(1).result(WAIT_S).ranges[0].queue_id for _ in range(8)} == {0}
    broker.ends.there["orders", 9] = QueueEnds(0, 4)
    # one receive may be the fair turn of level 0; the fair turns of the empty levels begin with the highest level
    assert [broker.receive(1).result(WAIT_S).ranges[0].queue_id for _ in range(5)].count(9) == 4


def test_an_ordered_queue_continues_after_its_messages_are_settled(broker: Broker) -> None:
    broker.send(4)
    [first] = broker.receive(2, ordered=True).result(WAIT_S).ranges
    following = broker.receive(2, wait_s=LONG_S, ordered=True)
    assert broker.receive(2, ordered=True).result(WAIT_S).ranges == ()
    broker.settle(first)
    assert spans(following.result(WAIT_S)) == [(2, 2)]


def test_a_lease_that_is_changed_to_expire_now_wakes_a_waiting_receive(broker: Broker) -> None:
    broker.send(1)
    [first] = broker.receive(1).result(WAIT_S).ranges
    waiting = broker.receive(1, wait_s=LONG_S)
    broker.settle(first, invisible_ms=0)
    [again] = waiting.result(WAIT_S).ranges
    assert again.attempts == 2


def test_a_receive_that_nobody_waits_for_leases_nothing(broker: Broker) -> None:
    left, leave = broker.begin(1, wait_s=LONG_S)
    stays = broker.receive(1, wait_s=LONG_S)
    eventually(lambda: broker.ends.asks[-1:] == [module.ASK_WAIT_S], "the question behind which both wait")
    leave()
    assert left.result(WAIT_S) == ReceiveAnswer((), 0)
    broker.send(1)
    [given] = stays.result(WAIT_S).ranges
    assert given.attempts == 1
    leave()
    assert broker.receive(1).result(WAIT_S).ranges == ()


def test_a_receive_whose_client_leaves_while_another_gets_its_messages_leases_nothing(broker: Broker) -> None:
    """Two receives wait under the same key. While the first gets its lease, the client of the second leaves."""
    first, leave_first = broker.begin(1, wait_s=LONG_S)
    second, leave_second = broker.begin(1, wait_s=LONG_S)
    eventually(lambda: broker.ends.asks[-1:] == [module.ASK_WAIT_S], "the question behind which both wait")
    gate = CallGate()
    broker.sender.before = gate
    broker.send(1)
    gate.wait()
    leave_second()
    assert second.result(WAIT_S) == ReceiveAnswer((), 0)
    broker.sender.before = lambda: None
    gate.open()
    assert spans(first.result(WAIT_S)) == [(0, 1)]
    leave_first()
    broker.send(1)
    assert spans(broker.receive(1, wait_s=LONG_S).result(WAIT_S)) == [(1, 1)]


def test_a_receive_that_is_decided_after_its_client_has_left_leases_nothing(broker: Broker) -> None:
    """The record of another change is written, so the decision about the receive waits for its turn."""
    broker.send(2)
    broker.receive(1).result(WAIT_S)  # the end of the queue is known now
    gate = CallGate()
    broker.sender.before = gate
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(broker.log.change, lambda state: state.decide_group("other"))
        gate.wait()
        left, leave = broker.begin(1, wait_s=LONG_S)
        leave()
        broker.sender.before = lambda: None
        gate.open()
        other.result(WAIT_S)
    assert left.result(WAIT_S) == ReceiveAnswer((), 0)
    [given] = broker.receive(1, wait_s=LONG_S).result(WAIT_S).ranges
    assert (given.start, given.attempts) == (1, 1)


def test_a_receive_that_lost_its_message_to_another_one_gets_the_next_message(broker: Broker) -> None:
    """While the message of a waiting receive is leased to another receive, the broker asks the store for the queues of
    the other groups only."""
    broker.log.change(lambda state: state.decide_topic("bills", 1, 1))
    broker.log.change(lambda state: state.decide_group("other"))
    broker.receives.submit(ReceiveRequest("other", ("bills",), 1, 60_000, LONG_S), lambda answer: None, print)
    loses = broker.receive(1, wait_s=LONG_S)
    eventually(lambda: broker.ends.asks[-1:] == [module.ASK_WAIT_S], "the question behind which both wait")
    gate = CallGate()
    broker.sender.before = gate
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(broker.log.change, lambda state: state.decide_group("third"))
        gate.wait()
        broker.send(1)
        broker.ends.known[QUEUE] = broker.ends.there[QUEUE]
        wins = broker.receive(1)
        asked = len(broker.ends.asks)
        del broker.ends.known[QUEUE]
        eventually(lambda: len(broker.ends.asks) > asked, "the question without the queue of the busy receive")
        broker.sender.before = lambda: None
        gate.open()
        change.result(WAIT_S)
    assert spans(wins.result(WAIT_S)) == [(0, 1)]
    broker.send(1)
    assert spans(loses.result(WAIT_S)) == [(1, 1)]


def test_many_receives_with_different_deadlines_end_in_time(broker: Broker) -> None:
    """The receives of one key end in the order of their deadlines, not of their arrival."""
    waiting = [broker.receive(1, wait_s=LONG_S) for _ in range(100)]
    short = [broker.receive(1, wait_s=0.05 * (3 - number)) for number in range(3)]
    assert [one.result(WAIT_S).ranges for one in short] == [(), (), ()]
    assert not any(one.done() for one in waiting)
    broker.send(100)
    got = [spans(one.result(WAIT_S)) for one in waiting]
    assert got == [[(number, 1)] for number in range(100)]
    # the deadlines of receives that have ended are not kept
    for _ in range(200):
        broker.receive(1).result(WAIT_S)
    assert len(broker.receives._waiting._deadlines) <= ENDED_DEADLINES_MAX + 1


def test_a_receive_in_vain_ends_when_it_has_waited(broker: Broker) -> None:
    assert broker.receive(1, wait_s=0.05).result(WAIT_S) == ReceiveAnswer((), 0)


def test_many_receives_at_a_time_get_each_message_once(broker: Broker) -> None:
    broker.send(100)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: broker.receive(7, wait_s=LONG_S).result(WAIT_S), range(14)))
    got = [offset for answer in answers for start, count in spans(answer) for offset in range(start, start + count)]
    assert sorted(got) == list(range(98))


def test_a_store_that_does_not_answer_fails_the_receive(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_TIMEOUT_S", 0.1)
    broker.ends.silent = True
    with pytest.raises(ServiceNotAvailableError, match="does not answer"):
        broker.receive(1).result(WAIT_S)


def test_an_invalid_receive_is_refused_with_the_reason(broker: Broker) -> None:
    with pytest.raises(InvalidArgumentError):
        broker.receive(0)
    with pytest.raises(GroupNotExistError):
        broker.receives.submit(ReceiveRequest("new", ("orders",), 1, 1000), print, print)
    with pytest.raises(TopicNotExistError):
        broker.receives.submit(ReceiveRequest("g", ("none",), 1, 1000), print, print)
    broker.log.change(lambda state: state.decide_group_config(GroupConfig("g", consume_enable=False)))
    with pytest.raises(NoPermissionError):
        broker.receive(1)


def test_a_waiting_receive_of_a_deleted_topic_ends_without_messages(broker: Broker) -> None:
    waiting = broker.receive(1, wait_s=0.3)
    broker.log.change(lambda state: state.decide_topic_delete("orders"))
    assert waiting.result(WAIT_S).ranges == ()


def test_waiting_receives_are_answered_when_the_broker_closes(broker: Broker) -> None:
    waiting = broker.receive(1, wait_s=LONG_S)
    eventually(lambda: broker.ends.asks, "the receive to wait")
    broker.receives.close()
    assert waiting.result(WAIT_S).ranges == ()
    assert not [thread for thread in threading.enumerate() if thread.name == "broker-receives"]
