"""One hook of a store: an operator's function, found by its import path, and called in its own thread with a time
limit.

A hook fails if it raises, or takes longer than hook_timeout_ms. Failures are counted, and logged at most once a minute.
While a call still runs, the hook is not called again, so that one slow call does not delay appends or fetches a second
time. No state survives the process.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

from raymq.common.errors import ConfigError
from raymq.common.protocol.store import HookFigures
from raymq.common.shipping import deferred_kind
from raymq.records.hooks import HookedBatch

logger = logging.getLogger(__name__)

FAILURE_LINE_PAUSE_S: Final = 60.0
"""Minimum time in seconds between two log messages about failures of one hook."""

# A hook function. Its argument is a PutBatch or a FetchedBatch, depending on the setting that names the hook.
HookFunction = Callable[[Any], object]


def find_hook(path: str, setting: str) -> HookFunction:
    """Import the function at the path ``package.module:name``. If the name is a class, create an instance of it.

    `setting`: the setting that contains the path. Raises ConfigError, with the setting and the cause, if the module
    cannot be imported in this process. Also raises it if the module has no such name, or the named object is not
    callable.
    """
    module_name, _, name = path.partition(":")
    where = f"store.{setting} names {path!r}, and"
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # importing the operator's hook module may raise any exception
        raise ConfigError(
            f"{where} module {module_name!r} cannot be imported in the store's process ({type(error).__name__}: "
            f"{error}); install it on the nodes with stores, or set PYTHONPATH before `ray start` there"
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise ConfigError(
                f"{where} module {module_name!r} has no {name!r}; name a function of the module"
            ) from None
    try:
        hook: Any = found() if isinstance(found, type) else found
    except Exception as error:
        raise ConfigError(
            f"{where} creating an instance of this class failed ({type(error).__name__}: {error})"
        ) from error
    if not callable(hook):
        raise ConfigError(
            f"{where} this object has type {type(hook).__name__!r}, which cannot be called; name a function "
            "with one parameter, a batch"
        )
    if kind := deferred_kind(hook):
        raise ConfigError(
            f"{where} this function is {kind}, so calling it does not run its code; name a plain function "
            "with one parameter, a batch"
        )
    function: HookFunction = hook
    return function


class _Call:
    """One call of a hook. The hook may still be running."""

    __slots__ = ("batches", "ended", "error")

    def __init__(self, batches: Sequence[HookedBatch]) -> None:
        self.batches = batches
        self.ended = threading.Event()
        self.error: BaseException | None = None


class Hook:
    """One hook of a store, with its thread and its counters. Thread-safe. Stop it with `close`."""

    def __init__(self, path: str, setting: str, timeout_s: float) -> None:
        """Import the hook function. Raises ConfigError as `find_hook` does."""
        self.path, self._setting, self._timeout_s = path, setting, timeout_s
        self._function = find_hook(path, setting)
        self._lock = threading.Lock()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._late: _Call | None = None
        self._told_s = float("-inf")
        self._batches = self._failed = self._skipped = self._refused = 0
        self._longest_s = 0.0
        self._thread = threading.Thread(target=self._run, name=f"hook-{path}", daemon=True)
        self._thread.start()

    def call(self, batches: Sequence[HookedBatch]) -> bool:
        """Call the hook with each of `batches`, for at most hook_timeout_ms in total.

        Returns False if the hook raised or took too long. Also returns False, without a call, if an earlier call still
        runs.
        """
        start_s = time.monotonic()
        if not self._lock.acquire(timeout=self._timeout_s):
            self._fail(f"took longer than hook_timeout_ms, {self._timeout_s * 1000:g} ms", skipped=True)
            return False
        try:
            if self._late is not None and not self._late.ended.is_set():
                self._fail("is still running a call that took too long", skipped=True)
                return False
            call = _Call(batches)
            self._calls.put(call)
            if not call.ended.wait(max(0.0, start_s + self._timeout_s - time.monotonic())):
                self._late = call
                self._fail(f"took longer than hook_timeout_ms, {self._timeout_s * 1000:g} ms")
                return False
            self._batches += len(batches)
            self._longest_s = max(self._longest_s, time.monotonic() - start_s)
            if call.error is not None:
                self._fail(f"raised {type(call.error).__name__}: {call.error}", call.error)
                return False
            return True
        finally:
            self._lock.release()

    def count_refusals(self, messages: int) -> None:
        """Count messages that the hook has refused."""
        self._refused += messages

    def figures(self) -> HookFigures:
        """Return the hook's counters since the store was opened."""
        return HookFigures(
            self.path,
            self._setting,
            self._batches,
            self._refused,
            self._failed,
            self._skipped,
            round(self._longest_s * 1000, 3),
        )

    def close(self) -> None:
        """Stop the hook's thread once the running call has ended. Does not wait for the call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                for batch in call.batches:
                    self._function(batch)
            except Exception as error:  # The operator's code may raise any exception.
                call.error = error
            call.ended.set()

    def _fail(self, text: str, error: BaseException | None = None, *, skipped: bool = False) -> None:
        self._failed += not skipped
        self._skipped += skipped
        now_s = time.monotonic()
        if now_s - self._told_s >= FAILURE_LINE_PAUSE_S:
            self._told_s = now_s
            logger.error("the hook %s (store.%s) %s", self.path, self._setting, text, exc_info=error)
