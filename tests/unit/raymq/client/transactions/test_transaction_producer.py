"""Tests of the transaction producer with a fake store: the outcomes of transactions, commits and rollbacks that fail,
and the producer's answers to transaction checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.client.transactions import checks
from raymq.client.transactions.checks import half_message
from raymq.client.transactions.producer import Transaction, TransactionProducer
from raymq.common.errors import (
    IllegalNameError,
    InvalidArgumentError,
    MessageIllegalError,
    ServiceNotAvailableError,
    TransactionError,
)
from raymq.common.message import Message, MessageExt, SendStatus
from raymq.common.names import HALF_TOPIC
from raymq.common.protocol.transactions import (
    EndResult,
    EndTransactionRequest,
    LocalTransactionState as State,
    TransactionCheck,
)
from raymq.records.format.decode import decode_record
from tests.support.clients.fakes import WAIT_S, FakeStore, no_thread_starts, topic_route
from tests.support.clients.producers import producers_of_fakes
from tests.support.history.waiting import eventually
from tests.support.stores.transactions import half_batch

MESSAGE = Message("orders", b"x", tags="paid", keys=["k"], properties={"a": "b"})


class Store(FakeStore):
    """A FakeStore that records commits and rollbacks of transactions. `end_script` holds the outcome of each commit or
    rollback, as `script` does for appends."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[EndTransactionRequest] = []
        self.end_script: list[Exception] = []

    def end_transaction(self, end: EndTransactionRequest, timeout_s: float) -> EndResult:
        self.ends.append(end)
        if self.end_script:
            raise self.end_script.pop(0)
        return EndResult(SendStatus.SEND_OK, 5, 500, 1, topic="orders", queue_id=0)

    def states(self) -> list[int]:
        return [end.commit_or_rollback for end in self.ends]


Make = Callable[..., TransactionProducer]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def make(store: Store) -> Iterator[Make]:
    made: list[TransactionProducer] = []
    with producers_of_fakes() as fakes:

        def build(check: Any = lambda message: None, *, brokers: Any = tuple, **settings: Any) -> TransactionProducer:
            producer = fakes(store, route=topic_route(a=1), **settings)
            made.append(
                TransactionProducer(
                    producer,
                    check,
                    routes=producer.test_routes,
                    storage=lambda name: store,
                    brokers=brokers,
                    client_id="me",
                )
            )
            return made[-1]

        yield build
        for one in made:
            one.close()


@pytest.mark.parametrize(
    ("answer", "state", "ends"),
    [
        (State.COMMIT_MESSAGE, State.COMMIT_MESSAGE, [8]),
        (State.ROLLBACK_MESSAGE, State.ROLLBACK_MESSAGE, [12]),
        (State.UNKNOW, State.UNKNOW, []),
        (None, State.UNKNOW, []),
        ("nonsense", State.UNKNOW, []),
    ],
)
def test_the_answer_of_the_local_transaction_is_the_outcome(make, store, answer, state, ends):
    called = []

    def local(transaction: Transaction, argument: object) -> Any:
        called.append((transaction.message, argument))
        return answer

    result = make().send_in_transaction(MESSAGE, local, 17)
    assert called == [(MESSAGE, 17)]
    assert (result.local_transaction_state, store.states(), result.end_error) == (state, ends, "")
    [[batch]] = store.attempts
    half = decode_record(batch.records)
    assert (half.topic, half.queue_id) == (HALF_TOPIC, 0)
    assert half.system_properties["REAL_TOPIC"] == "orders"
    assert half.system_properties["__transactionId__"] == half.message_id == result.transaction_id
    expected = ("orders", 5) if state is State.COMMIT_MESSAGE else (HALF_TOPIC, 0)
    assert (result.queue.topic, result.queue_offset) == expected


@pytest.mark.parametrize("status", [one for one in SendStatus if one is not SendStatus.SEND_OK])
def test_a_half_message_with_a_bad_status_is_rolled_back_without_the_block(make, store, status):
    """Golden fact 102 of spec/features.md: a half message whose send status is not SEND_OK is rolled back, and the
    local transaction does not run."""
    store.status = status
    result = make().send_in_transaction(MESSAGE, lambda *_: pytest.fail("it was called"))
    assert (result.local_transaction_state, result.status, store.states()) == (State.ROLLBACK_MESSAGE, status, [12])
    with pytest.raises(TransactionError, match="was rolled back"):
        make().transaction(MESSAGE)
    assert store.states() == [12, 12]


def test_an_error_of_the_local_transaction_leaves_the_outcome_unknown(make, store):
    def fails(*_: object) -> State:
        raise OSError("no database")

    result = make().send_in_transaction(MESSAGE, fails)
    assert (result.local_transaction_state, result.local_error) == (State.UNKNOW, "OSError: no database")
    assert store.ends == []


def test_an_end_is_repeated_until_it_is_answered(make, store):
    store.end_script = [ServiceNotAvailableError("it restarts")] * 2
    result = make().send_in_transaction(MESSAGE, lambda *_: State.COMMIT_MESSAGE)
    assert (store.states(), result.end_error) == ([8, 8, 8], "")


def test_a_refused_end_of_a_transaction_is_reported(make, store):
    store.end_script = [TransactionError("it is rolled back already")]
    result = make().send_in_transaction(MESSAGE, lambda *_: State.COMMIT_MESSAGE)
    assert result.end_error == "TransactionError: it is rolled back already"
    store.end_script = [TransactionError("it is rolled back already")]
    with pytest.raises(TransactionError), make().transaction(MESSAGE):
        pass


def test_a_block_ends_its_transaction_once(make, store):
    producer = make()
    with producer.transaction(MESSAGE):
        assert store.ends == []
    with pytest.raises(KeyboardInterrupt), producer.transaction(MESSAGE):
        raise KeyboardInterrupt
    with producer.transaction(MESSAGE) as transaction:
        transaction.rollback()
    assert store.states() == [8, 12, 12]
    store.end_script = [TransactionError("given up")]
    # The user's error is raised, not the error of the failing rollback.
    with pytest.raises(ZeroDivisionError), producer.transaction(MESSAGE):
        raise ZeroDivisionError


def test_a_half_message_is_not_delayed_and_keeps_everything_else():
    delayed = Message("orders", b"x", tags="t", keys=["k"], properties={"a": "b"}, flag=7, delay_level=3)
    half = half_message(delayed, "g", 30)
    assert (half.delay_level, half.deliver_at_ms) == (0, None)
    assert (half.topic, half.body, half.tags, half.keys, half.flag) == ("orders", b"x", "t", ("k",), 7)
    assert half.properties == {"a": "b", "TRAN_MSG": "true", "PGROUP": "g", "CHECK_IMMUNITY_TIME_IN_SECONDS": "30"}


@pytest.mark.parametrize(
    ("topic", "error"),
    [("%RETRY%g", MessageIllegalError), ("%DLQ%g", MessageIllegalError), (HALF_TOPIC, IllegalNameError)],
)
def test_topics_of_the_server_and_of_groups_are_refused(topic, error):
    with pytest.raises(error):
        half_message(Message(topic, b"x"), "g")


@pytest.mark.parametrize("immunity", [0, -1, 1.5, "3", True])
def test_an_immunity_time_is_a_whole_number_of_seconds(immunity):
    with pytest.raises(InvalidArgumentError):
        half_message(MESSAGE, "g", immunity)


@pytest.mark.parametrize("arguments", [{"check": None}, {"check_threads": 0}])
def test_a_producer_needs_a_check_and_a_thread_for_it(arguments):
    values: dict[str, Any] = {"check": lambda message: None, "check_threads": 1, **arguments}
    with producers_of_fakes() as fakes:
        sends = fakes(FakeStore())
        with pytest.raises(InvalidArgumentError):
            TransactionProducer(sends, routes=None, storage=None, brokers=tuple, client_id="me", **values)


# Tests of transaction checks


def question(number: int) -> TransactionCheck:
    batch = half_batch([MESSAGE], ids=[f"T{number}"], group="group", queue_id=2)
    return TransactionCheck("group", f"T{number}", number, number * 100, 1, bytes(batch.records))


@pytest.mark.parametrize("error", [OSError("no database"), SystemExit(3)])
def test_a_check_that_raises_is_left_to_the_next_round(make, store, monkeypatch, caplog, error):
    asked: list[MessageExt] = []
    first_round = [[1, 2]]

    class Broker:
        """Repeats a check in each round until the producer has answered it, as brokers do."""

        def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
            assert arguments == ("group", "me")
            if method != "take_transaction_checks":
                return []
            numbers = first_round.pop() if first_round else [[], [], [2], [3]][min(len(asked), 3)]
            return [question(number) for number in numbers]

    def check(message: MessageExt) -> State | None:
        asked.append(message)
        if len(asked) == 2:
            raise error
        return State.COMMIT_MESSAGE if message.message_id == "T1" else None

    monkeypatch.setattr(checks, "CHECK_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(checks, "broker_client", lambda name: Broker())
    make(check, brokers=lambda: ["a"])
    eventually(lambda: any(one.message_id == "T3" for one in asked), "all checks")
    assert [one.message_id for one in asked[:3]] == ["T1", "T2", "T2"]
    assert {(one.topic, one.queue_id, one.body) for one in asked} == {("orders", 2, b"x")}
    eventually(lambda: store.ends, "an end")
    assert "cannot answer the check of transaction T2; the broker repeats the check" in caplog.text
    [end] = store.ends
    assert end == EndTransactionRequest("group", 1, 100, 8, "T1", from_transaction_check=True)


def test_the_polling_goes_on_after_the_pool_of_checks_has_refused_one(make, store, monkeypatch):
    polls: list[str] = []

    class Broker:
        def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
            polls.append(method)
            return [question(1)] if method == "take_transaction_checks" else []

    monkeypatch.setattr(checks, "CHECK_POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(checks, "broker_client", lambda name: Broker())
    listener = make(brokers=lambda: ["a"])._listener
    listener._pool.shutdown()  # as the interpreter's exit does
    count = len(polls)
    eventually(lambda: len(polls) > count + 2, "further polls", WAIT_S)
    assert not listener._pending - {"T1"}
    eventually(lambda: not listener._pending, "the refused check is forgotten", WAIT_S)


def test_a_transaction_may_begin_at_the_exit_where_no_thread_starts(make, store):
    with no_thread_starts():
        producer = make()
        result = producer.send_in_transaction(MESSAGE, lambda *_: State.COMMIT_MESSAGE)
        producer.close()
    assert (result.local_transaction_state, store.states()) == (State.COMMIT_MESSAGE, [8])
