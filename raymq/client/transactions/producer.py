"""TransactionProducer: a message becomes visible if, and only if, a local transaction was committed.

    send_in_transaction    half message ▶ local transaction ▶ commit or rollback
    with transaction(…)    half message ▶ the block ▶ commit at its end, rollback on an exception

The half message is stored as durably as any other message, and no consumer sees it. The producer may die before it ends
its transaction, or the end request may be lost. If so, the broker repeatedly sends a check to a live producer of the
group (`check`). So `check` must find out the outcome by itself, for example in the database that the local transaction
wrote to, and must always return the same outcome. `check` may be called in another process. It may also be called for a
transaction in progress; it then returns UNKNOW.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Final, NoReturn, Self

from msgspec import structs

from raymq.client.producer.producer import Producer
from raymq.client.producer.queue_selector import DestinationOptions
from raymq.client.transactions.checks import IMMUNITY_S, Check, CheckListener, half_message
from raymq.client.transactions.group_transactions import end_transaction
from raymq.common.closing import Closing
from raymq.common.errors import InvalidArgumentError, RaymqError, TransactionError
from raymq.common.message import Message, MessageExt, MessageQueue, SendResult, SendStatus
from raymq.common.numbers import bounded
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, LocalTransactionState
from raymq.common.shipping import deferred_kind
from raymq.records.format.message_id import parse_offset_message_id
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient

CHECK_THREADS_MAX: Final = 64

logger = logging.getLogger(__name__)


class TransactionSendResult(SendResult, frozen=True, gc=False):
    """The result of a send in a transaction.

    `local_transaction_state`: the outcome of the local transaction. After a commit, `queue` and `queue_offset` belong
    to the message. Otherwise they belong to the half message, which no consumer sees. `end_error`: why the outcome did
    not reach the broker, or why the broker refused the outcome. `local_error`: the exception of the local transaction.
    Both errors are empty if no error occurred. If the outcome did not reach the broker, a later check determines the
    outcome.
    """

    local_transaction_state: LocalTransactionState = LocalTransactionState.UNKNOW
    end_error: str = ""
    local_error: str = ""

    @property
    def transaction_id(self) -> str:
        """The transaction's id, which is the message's unique id."""
        return self.message_id


LocalTransaction = Callable[["Transaction", Any], LocalTransactionState | None]
"""The user's function that runs a local transaction and returns its outcome; None stands for UNKNOW. The second
argument is the `argument` of `send_in_transaction`."""


class Transaction:
    """A transaction whose half message is stored. A `with` statement commits the transaction at the end of the block.

    Made by `TransactionProducer.transaction`. Only one thread may use a transaction.
    """

    def __init__(self, producer: TransactionProducer, message: Message, half: SendResult) -> None:
        self.message = message
        self._producer, self.half = producer, half
        # Outcome of the transaction; None while the transaction is open.
        self.state: LocalTransactionState | None = None
        # Topic, queue and offset of the transaction's message; None until the transaction is committed.
        self.committed: EndResult | None = None

    @property
    def transaction_id(self) -> str:
        """The transaction's id, which is the message's unique id: consumers and `check` see it as `message_id`."""
        return self.half.message_id

    message_id = transaction_id

    def commit(self) -> EndResult:
        """Commit: make the message visible to consumers. Raises the errors of `rollback`."""
        self.committed = self._end(LocalTransactionState.COMMIT_MESSAGE)
        return self.committed

    def rollback(self) -> None:
        """Roll back the transaction: drop its message. A second rollback changes nothing.

        Raises TransactionError if the transaction already ended with the other outcome, or if the broker has abandoned
        it. Raises ServiceNotAvailableError or RequestTimeoutError if the broker did not answer within the send timeout.
        After such an error a later check determines the outcome.
        """
        self._end(LocalTransactionState.ROLLBACK_MESSAGE)

    def _end(self, state: LocalTransactionState) -> EndResult:
        self.state = state
        return self._producer.end(self, state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.state is not None:
            return
        if error is None:
            self.commit()
            return
        try:
            self.rollback()
        except RaymqError as failure:  # a failed rollback is only logged, so that the `with` block raises its own error
            logger.warning("transaction %s is not rolled back yet: %s", self.transaction_id, failure)


class TransactionProducer(Closing):
    """Sends messages in transactions. Thread-safe; made by `Client.transaction_producer`, closed by `close` or `with`.

    A transaction producer cannot be pickled: make one in each process that sends.
    """

    def __init__(
        self,
        producer: Producer,
        check: Check,
        *,
        routes: RouteSource,
        storage: Callable[[str], StorageClient],
        brokers: Callable[[], Iterable[str]],
        client_id: str,
        check_threads: int = 1,
        on_close: Callable[[TransactionProducer], None] = lambda producer: None,
    ) -> None:
        """`producer`: sends the half messages, and is closed together with this object. Raises InvalidArgumentError if
        `check` is not a plain function, or if `check_threads` is out of range."""
        if not callable(check):
            raise InvalidArgumentError(
                "a transaction producer needs check=, a function that returns the outcome of a transaction"
            )
        if kind := deferred_kind(check):
            raise InvalidArgumentError(f"check= of a transaction producer is {kind}: pass a plain function")
        if not 1 <= check_threads <= CHECK_THREADS_MAX:
            raise InvalidArgumentError(f"check_threads must be 1 to {CHECK_THREADS_MAX}, not {check_threads}")
        self.group = producer.group
        self._names = names = producer.names
        self._producer, self._routes, self._storage = producer, routes, storage
        self._on_close = on_close
        self._listener = CheckListener(
            names.wrap(self.group),
            client_id,
            lambda message: check(names.shown_message(message)),
            brokers=brokers,
            end=self._end_checked,
            threads=check_threads,
        )

    @bounded(check_immunity_s=IMMUNITY_S)
    def send_in_transaction(
        self,
        message: Message,
        local_transaction: LocalTransaction,
        argument: Any = None,
        *,
        check_immunity_s: int | None = None,
        sharding_key: str | int | None = None,
        queue: MessageQueue | None = None,
    ) -> TransactionSendResult:
        """Store a half message, call ``local_transaction(transaction, argument)``, and end the transaction with the
        outcome that this function returns.

        If the local transaction raises an exception, the outcome is UNKNOW, and a later check determines it. If the
        half message is stored less durably than requested, the local transaction is not called, and the message is
        rolled back. If the send of the half message raises an error, the local transaction is not called.

        `check_immunity_s`: the age in seconds before which the broker does not check the transaction (default: the
        store's transaction_time_out_ms). If it is set, only a check can end the transaction later. The other arguments
        are explained in `Producer.send`. A delay of the message is ignored.
        """
        transaction = self._begin(message, check_immunity_s, sharding_key, queue)
        state, local_error = _run(transaction, local_transaction, argument)
        end_error = ""
        if state is not LocalTransactionState.UNKNOW:
            try:
                if state is LocalTransactionState.COMMIT_MESSAGE:
                    transaction.commit()
                else:
                    transaction.rollback()
            except RaymqError as error:
                logger.warning("transaction %s is not ended yet: %s", transaction.transaction_id, error)
                end_error = f"{type(error).__name__}: {error}"
        return _result(transaction, state, end_error, local_error)

    @bounded(check_immunity_s=IMMUNITY_S)
    def transaction(
        self,
        message: Message,
        *,
        check_immunity_s: int | None = None,
        sharding_key: str | int | None = None,
        queue: MessageQueue | None = None,
    ) -> Transaction:
        """Store a half message, and return its transaction for a `with` statement. The block of the statement is the
        local transaction.

        At the end of the block the message is committed. An exception, or `rollback()` in the block, rolls it back.
        Takes the arguments and raises the errors of `send_in_transaction`. If the half message is stored less durably
        than requested, it is rolled back, and TransactionError is raised. The end of the block raises the errors of
        `Transaction.rollback`.
        """
        transaction = self._begin(message, check_immunity_s, sharding_key, queue)
        if transaction.half.status is not SendStatus.SEND_OK:
            transaction.rollback()
            raise TransactionError(
                f"the half message was stored less durably than requested ({transaction.half.status.value}), so "
                "the transaction was rolled back; begin a new transaction"
            )
        return transaction

    def end(self, transaction: Transaction, state: LocalTransactionState) -> EndResult:
        """End a transaction of this producer. Raises the errors of `Transaction.rollback`."""
        half = transaction.half
        physical_offset = parse_offset_message_id(half.offset_message_id).physical_offset
        order = EndTransactionRequest(
            self._names.wrap(self.group), half.queue_offset, physical_offset, int(state), half.message_id
        )
        topic = self._names.wrap(transaction.message.topic)
        result = self._end_at(half.queue.broker_name, topic, order)
        result = structs.replace(result, topic=self._names.unwrap(result.topic))
        for observer in self._producer.observers:
            observer.transaction_ended(topic, transaction.message, half.message_id, half.offset_message_id, state.name)
        return result

    def close(self) -> None:
        """Stop the transaction checks, and close the producer. Idempotent. Open transactions stay open: checks by other
        producers of the group determine their outcomes."""
        self._listener.close()
        try:
            self._producer.close()
        finally:
            self._on_close(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a transaction producer cannot be pickled: call raymq.connect().transaction_producer(...) in the "
            "process that uses the producer"
        )

    def _begin(
        self, message: Message, check_immunity_s: int | None, sharding_key: str | int | None, queue: MessageQueue | None
    ) -> Transaction:
        where: DestinationOptions = {}
        if sharding_key is not None:
            where["sharding_key"] = sharding_key
        if queue is not None:
            where["queue"] = queue
        half = half_message(message, self._names.wrap(self.group), check_immunity_s)
        return Transaction(self, message, self._producer.send(half, **where))

    def _end_checked(self, broker_name: str, message: MessageExt, order: EndTransactionRequest) -> None:
        """End a transaction with the outcome that a check returned, and notify the observers."""
        self._end_at(broker_name, message.topic, order)
        state = LocalTransactionState(order.commit_or_rollback).name
        for observer in self._producer.observers:
            observer.transaction_ended(
                message.topic, message, order.transaction_id, message.offset_message_id, state, from_check=True
            )

    def _end_at(self, broker_name: str, topic: str, order: EndTransactionRequest) -> EndResult:
        """End a transaction at a broker group's master, within the send timeout."""
        timeout_s = self._producer.settings.send_timeout_s
        return end_transaction(broker_name, topic, order, timeout_s, routes=self._routes, storage=self._storage)


def _run(
    transaction: Transaction, local_transaction: LocalTransaction, argument: Any
) -> tuple[LocalTransactionState, str]:
    """Run a local transaction. Returns its outcome, and the text of the exception that it raised (empty if
    none)."""
    if transaction.half.status is not SendStatus.SEND_OK:
        return LocalTransactionState.ROLLBACK_MESSAGE, ""
    try:
        state = local_transaction(transaction, argument)
        outcome = LocalTransactionState.UNKNOW if state is None else LocalTransactionState(state)
    # the local transaction may have been committed before the exception, so the outcome is unknown
    except Exception as error:
        logger.warning(
            "the block of transaction %s raised an exception; a later check decides its outcome",
            transaction.transaction_id,
            exc_info=True,
        )
        return LocalTransactionState.UNKNOW, f"{type(error).__name__}: {error}"
    return outcome, ""


def _result(
    transaction: Transaction, state: LocalTransactionState, end_error: str, local_error: str
) -> TransactionSendResult:
    half, committed = transaction.half, transaction.committed
    queue, queue_offset = half.queue, half.queue_offset
    if committed is not None:
        queue, queue_offset = (
            MessageQueue(committed.topic, queue.broker_name, committed.queue_id),
            committed.queue_offset,
        )
    return TransactionSendResult(
        half.status,
        half.message_id,
        half.offset_message_id,
        queue,
        queue_offset,
        local_transaction_state=state,
        end_error=end_error,
        local_error=local_error,
    )
