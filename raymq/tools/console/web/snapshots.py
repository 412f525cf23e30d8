"""Answers that many pages share: asked for once, and kept for a few seconds.

However many people look, each list is asked for at most every SNAPSHOT_KEPT_S. When the cluster gives no answer, the
last one is shown, with its age and the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from raymq.common.errors import RaymqError

SNAPSHOT_KEPT_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[T]):
    """An answer, `age_s` old. `error` is empty if it is a fresh one; `value` None if there never was one."""

    value: T | None
    age_s: float = 0.0
    error: str = ""


class Snapshots:
    """The answers by name. Used from one event loop."""

    def __init__(self, *, kept_s: float = SNAPSHOT_KEPT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_s = kept_s
        self._clock = clock
        self._values: dict[str, tuple[Any, float]] = {}
        self._asking: dict[str, asyncio.Task[str]] = {}

    async def get(self, name: str, ask: Callable[[], Awaitable[T]]) -> Snapshot[T]:
        """The answer called `name`: the kept one if it is young enough, else that of `ask`, for which all that want it
        wait together. Never raises: the error is in the snapshot."""
        value, at_s = self._values.get(name, (None, 0.0))
        if name in self._values and self._clock() - at_s < self._kept_s:
            return Snapshot(value, self._clock() - at_s)
        task = self._asking.get(name)
        if task is None:
            task = self._asking[name] = asyncio.ensure_future(self._ask(name, ask))
        error = await asyncio.shield(task)
        value, at_s = self._values.get(name, (None, self._clock()))
        return Snapshot(value, self._clock() - at_s, error)

    async def _ask(self, name: str, ask: Callable[[], Awaitable[Any]]) -> str:
        """Ask, and keep the answer; returns the error, "" without one."""
        try:
            value = await ask()
        except RaymqError as error:
            return str(error)
        finally:
            del self._asking[name]
        self._values[name] = (value, self._clock())
        return ""

    def forget(self) -> None:
        """Ask anew for everything: somebody has changed something."""
        self._values = {name: (value, at_s - self._kept_s) for name, (value, at_s) in self._values.items()}
