"""The appends of a storage actor's lanes that are written, and wait for the disk or for copies.

When something moves (a flush, a copy, a new role) all of them are asked, and those that are settled get their answers
in the order in which they came. Time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from raymq.common.errors import RaymqError
from raymq.common.protocol.store import AppendResult

TokenT = TypeVar("TokenT")


class Started(Protocol):
    """An append that was started (storage.append.durability.StartedAppend)."""

    @property
    def deadline_s(self) -> float: ...
    def settle(self, now_s: float) -> list[AppendResult] | None: ...


class Settled(NamedTuple, Generic[TokenT]):
    """An append that is to be answered, with its results or with an error."""

    token: TokenT
    results: Sequence[AppendResult]
    error: RaymqError | None


class PendingAppends(Generic[TokenT]):
    """The appends that wait, each with a token of the caller's. For one thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Started, TokenT]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, started: Started, token: TokenT) -> None:
        """Add an append that was not settled when it was started."""
        self._waiting.append((started, token))

    def settle(self, now_s: float) -> list[Settled[TokenT]]:
        """Take out the appends that are settled at `now_s`, in the order of `add`."""
        settled: list[Settled[TokenT]] = []
        left: list[tuple[Started, TokenT]] = []
        for started, token in self._waiting:
            try:
                results = started.settle(now_s)
            except RaymqError as error:
                settled.append(Settled(token, (), error))
                continue
            if results is None:
                left.append((started, token))
            else:
                settled.append(Settled(token, results, None))
        self._waiting = left
        return settled

    @property
    def next_deadline_s(self) -> float | None:
        """When `settle` is to be called at the latest, on the clock of its argument; None while none waits."""
        return min((started.deadline_s for started, _ in self._waiting), default=None)
