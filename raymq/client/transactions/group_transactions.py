"""GroupTransactions ends transactions of any producer group, and takes the checks of many producer groups at once.

A TransactionProducer works for one group, and calls the user's function in its own process. A gateway works for the
groups of many other programs: it asks all brokers with one call for all groups, and passes the checks on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from raymq.common.errors import RaymqError
from raymq.common.protocol.transactions import EndResult, EndTransactionRequest, TransactionCheck
from raymq.common.retry import persist_until
from raymq.remoting.broker_client import broker_client
from raymq.remoting.master_locator import MasterLocator, RouteSource
from raymq.remoting.storage_client import StorageClient

END_CALL_TIMEOUT_S: Final = 10.0
"""Timeout in seconds of one attempt to end a transaction."""
CHECK_CALL_TIMEOUT_S: Final = 2.0
"""Timeout in seconds of one call that takes transaction checks from a broker."""


def end_transaction(
    broker_name: str,
    topic: str,
    order: EndTransactionRequest,
    timeout_s: float,
    *,
    routes: RouteSource,
    storage: Callable[[str], StorageClient],
) -> EndResult:
    """End a transaction at a broker group's master. Retries until the master answers or `timeout_s` has passed.

    `topic`: a topic whose route has the broker group. Raises TransactionError if the transaction already ended with the
    other outcome, or if it does not exist. Raises ServiceNotAvailableError or RequestTimeoutError if the master did not
    answer: the transaction may have ended or not, and the call can be repeated.
    """
    master = MasterLocator(broker_name, routes, storage)

    def attempt(left_s: float) -> EndResult:
        try:
            return master.locate(topic).end_transaction(order, min(left_s, END_CALL_TIMEOUT_S))
        except RaymqError as error:
            if error.retryable:
                master.attempt_failed(topic)
            raise

    return persist_until(time.monotonic() + timeout_s, attempt)


class GroupTransactions:
    """The transactions of all producer groups. All calls block. Thread-safe."""

    def __init__(
        self, *, routes: RouteSource, storage: Callable[[str], StorageClient], brokers: Callable[[], Iterable[str]]
    ) -> None:
        """`brokers`: returns the names of all brokers."""
        self._routes, self._storage, self._brokers = routes, storage, brokers

    def end(self, broker_name: str, topic: str, order: EndTransactionRequest, timeout_s: float) -> EndResult:
        """End a transaction (`end_transaction`)."""
        return end_transaction(broker_name, topic, order, timeout_s, routes=self._routes, storage=self._storage)

    def brokers(self) -> list[str]:
        """Return the names of all brokers that can have transaction checks."""
        return list(self._brokers())

    def take_checks(self, broker_name: str, groups: Sequence[str], client_id: str) -> list[TransactionCheck]:
        """Return the next transaction checks of `groups` at one broker. The groups count as live for some seconds.

        The broker repeats a check that stays without an outcome. Raises ServiceNotAvailableError or
        RequestTimeoutError if the broker does not answer; then checks may be lost, which the broker repeats, too.
        """
        checks: list[TransactionCheck] = broker_client(broker_name).call(
            "take_group_checks", list(groups), client_id, timeout_s=CHECK_CALL_TIMEOUT_S
        )
        return checks

    def leave_checks(self, broker_name: str, group: str, client_id: str) -> None:
        """Inform one broker that this client answers no more checks of a group."""
        broker_client(broker_name).call("leave_transaction_checks", group, client_id, timeout_s=CHECK_CALL_TIMEOUT_S)
