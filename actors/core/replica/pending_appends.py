"""The written appends on a storage actor's lanes (direct socket connections) that wait for the disk or for replicas.

After each progress (a flush, a copy, a new role) every waiting append is checked. Completed appends are answered in the
order of their arrival. The methods get the current time as an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from raymq.common.errors import RaymqError
from raymq.common.protocol.store import AppendResult

TokenT = TypeVar("TokenT")


class Started(Protocol):
    """The interface of a started append (storage.append.durability.StartedAppend)."""

    @property
    def deadline_s(self) -> float: ...
    def settle(self, now_s: float) -> list[AppendResult] | None: ...


class EndedAppend(NamedTuple, Generic[TokenT]):
    """An append that must be answered now: with its results, or with an error."""

    token: TokenT
    results: Sequence[AppendResult]
    error: RaymqError | None


class PendingAppends(Generic[TokenT]):
    """The appends that wait for the disk or for replicas. Each has a token by which the caller identifies it. Not
    thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Started, TokenT]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, started: Started, token: TokenT) -> None:
        """Remember an append that was started and still waits for the disk or for replicas. `token` identifies the
        request to answer when the append has ended."""
        self._waiting.append((started, token))

    def settle(self, now_s: float) -> list[EndedAppend[TokenT]]:
        """Remove and return the appends that have completed or failed at `now_s`, in the order of `add`."""
        settled: list[EndedAppend[TokenT]] = []
        left: list[tuple[Started, TokenT]] = []
        for started, token in self._waiting:
            try:
                results = started.settle(now_s)
            except RaymqError as error:
                settled.append(EndedAppend(token, (), error))
                continue
            if results is None:
                left.append((started, token))
            else:
                settled.append(EndedAppend(token, results, None))
        self._waiting = left
        return settled

    @property
    def next_deadline_s(self) -> float | None:
        """Return the time by which the caller must call `settle` again, because the first waiting append then times
        out. None if no append waits. `settle` and this time use the same clock."""
        return min((started.deadline_s for started, _ in self._waiting), default=None)
