"""Tests of requests that a broker passes to clients, whose threads poll the broker for requests. A client may answer a
request, refuse it, answer too late, or end before it answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from actors.members import methods as module
from actors.members.methods import QuestionMethods
from raymq.common.errors import (
    InvalidArgumentError,
    RequestTimeoutError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.members.questions import MemberAnswer, Question, decode_answer, encode_answer
from raymq.remoting import question_listener
from raymq.remoting.lane.calls import decode_result
from raymq.remoting.lane.loop import Loop
from raymq.remoting.question_listener import QuestionListener
from tests.support.clients.fakes import AT_SHUTDOWN, WAIT_S, no_thread_starts
from tests.support.history.waiting import eventually

QUESTION = Question("running", "billing")


class Held:
    """A call on a lane (direct socket connection), with a future for its result."""

    def __init__(self) -> None:
        self.done: Future[list[Question]] = Future()

    def answer(self, payload: bytes) -> None:
        if not self.done.done():
            self.done.set_result(decode_result(payload, list[Question]))


class Broker(QuestionMethods):
    """Fake broker to which clients send queries. An event loop in this process replaces the event loop of the broker's
    lane (direct socket connection)."""

    def __init__(self) -> None:
        self.loop = Loop("questions")
        self.loop.start()
        super().__init__(lambda: self.loop)
        self.gone = False
        self.calls: list[str] = []

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append(method)
        if self.gone:
            raise ServiceNotAvailableError("the broker is gone")
        if method != "take_questions":
            return getattr(self, method)(*args)
        held = Held()
        self.loop.call_soon(lambda: self._take_questions_soon(held, *args))  # type: ignore[arg-type]  # a fake
        return held.done.result(timeout_s)

    def listens(self, client_id: str) -> bool:
        return client_id in self._held


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    broker = Broker()
    monkeypatch.setattr(question_listener, "broker_client", lambda name: broker)
    yield broker
    broker.loop.stop(lambda: None)


@pytest.fixture
def client(broker: Broker) -> Iterator[Any]:
    """Yield a function that starts a client `c`. The client answers each request with the function that the test
    passes."""
    listeners = []

    def start(answer: Any) -> QuestionListener:
        listeners.append(QuestionListener("c", lambda: ["a"], answer))
        eventually(lambda: broker.listens("c"), "the client's call")
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.begin_close()
        broker._client_has_ended("c")
        listener.close()


def ask(broker: Broker, timeout_s: float = WAIT_S) -> MemberAnswer | None:
    encoded = broker.ask_client("c", QUESTION, timeout_s)
    return None if encoded is None else decode_answer(encoded)


def test_a_question_is_answered_by_the_client_and_so_is_the_next(broker: Broker, client: Any) -> None:
    client(lambda question: MemberAnswer(f"about {question.group}"))
    for _ in range(3):
        assert ask(broker) == MemberAnswer("about billing")


def test_a_client_that_does_not_listen_here_has_not_got_the_question(broker: Broker) -> None:
    assert ask(broker) is None


@pytest.mark.parametrize(
    ("error", "told"),
    [(InvalidArgumentError("not me"), "not me"), (KeyError("bug"), "the query failed: KeyError('bug')")],
)
def test_a_failure_at_the_client_is_reported(broker: Broker, client: Any, error: Exception, told: str) -> None:
    def fail(question: Question) -> MemberAnswer:
        raise error

    client(fail)
    assert ask(broker) == MemberAnswer(told)


def test_an_answer_that_is_too_late_is_dropped_and_the_next_question_is_answered(broker: Broker, client: Any) -> None:
    late, answered = threading.Event(), threading.Event()

    def answer(question: Question) -> MemberAnswer:
        late.wait(WAIT_S)
        answered.set()
        return MemberAnswer("done")

    client(answer)
    with pytest.raises(RequestTimeoutError, match="the query to client c about group 'billing'"):
        ask(broker, 0.05)
    late.set()
    assert answered.wait(WAIT_S)
    assert ask(broker) == MemberAnswer("done")


def test_few_askers_wait_at_a_time(broker: Broker, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # maximum number of requests that a client answers at the same time; it refuses further requests
    askers_max = question_listener.ANSWERING_MAX
    monkeypatch.setattr(module, "ASKS_MAX", askers_max)
    begin = threading.Event()

    def answer(question: Question) -> MemberAnswer:
        begin.wait(WAIT_S)
        return MemberAnswer()

    client(answer)
    with ThreadPoolExecutor(askers_max) as pool:
        asked = [pool.submit(ask, broker) for _ in range(askers_max)]
        eventually(lambda: len(broker._askers) == askers_max, "all of them wait")
        with pytest.raises(SystemBusyError):
            ask(broker)
        begin.set()
        assert [one.result(WAIT_S) for one in asked] == [MemberAnswer()] * askers_max


def test_a_client_that_ends_lets_its_call_go_at_once(broker: Broker, client: Any) -> None:
    listener = client(lambda question: MemberAnswer())
    listener.begin_close()
    broker._client_has_ended("c")
    listener.close()
    assert not listener._thread.is_alive()
    assert ask(broker) is None


def test_a_call_that_nobody_answers_ends_by_itself(broker: Broker) -> None:
    held = Held()
    broker.loop.call_soon(lambda: broker._take_questions_soon(held, "c", 0.01))  # type: ignore[arg-type]  # a fake
    assert held.done.result(WAIT_S) == []
    assert not broker.listens("c")


def test_a_second_call_of_a_client_takes_the_place_of_the_first(broker: Broker) -> None:
    first, second = Held(), Held()
    for held in (first, second):
        broker.loop.call_soon(lambda held=held: broker._take_questions_soon(held, "c", WAIT_S))
    assert first.done.result(WAIT_S) == []
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, broker)
        [question] = second.done.result(WAIT_S)
        broker.answer_question("another", question.ticket, encode_answer(MemberAnswer("forged")))
        broker.answer_question("c", question.ticket, encode_answer(MemberAnswer("mine")))
        assert asked.result(WAIT_S) == MemberAnswer("mine")


def test_an_answer_has_a_longest_length(broker: Broker) -> None:
    with pytest.raises(InvalidArgumentError, match="at most"):
        broker.answer_question("c", "1", bytes(module.MEMBER_ANSWER_MAX_BYTES + 1))


def test_a_client_continues_to_poll_when_its_broker_returns(
    broker: Broker, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_listener, "QUESTION_PAUSE_S", 0.01)
    broker.gone = True
    listener = QuestionListener("c", lambda: ["a", "b"], lambda question: MemberAnswer("back"))
    eventually(lambda: broker.calls.count("take_questions") > 1, "it asks again")
    broker.gone = False
    eventually(lambda: broker.listens("c"), "the call")
    assert ask(broker) == MemberAnswer("back")
    listener.begin_close()
    broker._client_has_ended("c")
    listener.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [(AT_SHUTDOWN, "process is ending"), ("can't start new thread", "cannot start a thread that answers the query")],
)
def test_a_client_that_can_start_no_thread_refuses_and_answers_later(
    broker: Broker, client: Any, monkeypatch: pytest.MonkeyPatch, error: str, told: str
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError(error)

    client(lambda question: MemberAnswer("here"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(question_listener.ANSWERING_MAX + 1):
            answer = ask(broker)
            assert answer is not None
            assert told in answer.error
    assert ask(broker) == MemberAnswer("here")


def test_a_client_of_the_exit_listens_for_no_queries() -> None:
    with no_thread_starts():
        listener = QuestionListener("c", lambda: ["a"], lambda question: MemberAnswer())
        listener.begin_close()
        listener.close()
