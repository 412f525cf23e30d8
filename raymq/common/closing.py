"""Base classes of client objects. `with` closes a client object, signal handlers cannot corrupt it, and forked children
cannot use it.

    fork ──► child: each OfProcess object refuses every call, lanes are closed, shared locks are free
         └─► parent: nothing changes

A lane is raymq's own socket connection to an actor, beside Ray's calls.

A forked child has copies of its parent's objects, but not the parent's threads. A copied producer would send with the
parent's sequence numbers, over the parent's connections. So `_in_child` changes the class of each copied object once,
in the child. A process that never forks has no cost. A child may use the objects that it creates itself.

A signal handler may raise an exception between any two bytecodes of the main thread. So if the main thread calls a
public method of an OfProcess object, the method runs in a helper thread (raymq.common.parallel.aside), which costs
about 15 µs. Methods marked `direct` run in the calling thread: they are too short or too frequent for a helper thread,
and an exception from a signal handler does not corrupt their objects.

Arguments of public methods that are annotated as int or float are checked before the method begins
(raymq.common.numbers).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isfunction, isgeneratorfunction
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from raymq.common.errors import ClientStateError
from raymq.common.numbers import checked
from raymq.common.parallel import aside

logger = logging.getLogger(__name__)

_objects: Final[weakref.WeakSet[OfProcess]] = weakref.WeakSet()
"""The live client objects of this process. A forked child disables its copies of these objects."""
_connections: Final[weakref.WeakSet[ClosableConnection]] = weakref.WeakSet()
_locks: Final[list[threading.Lock]] = []
_process_id = os.getpid()

_NOT_CALLS: Final = (iscoroutinefunction, isgeneratorfunction, isasyncgenfunction)
"""Predicates for coroutine functions and generator functions. A call of such a function only creates an object and does
its work later, so no helper thread must protect the call against signals."""


F = TypeVar("F", bound=Callable[[], None])
M = TypeVar("M", bound=Callable[..., Any])


def direct(method: M) -> M:
    """Mark a public method of a client object (OfProcess) to run in its caller's thread. Without this mark, calls from
    the main thread run in a helper thread."""
    method.is_direct = True  # type: ignore[attr-defined]
    return method


def unwrapped(method: M) -> M:
    """Mark a public method of an OfProcess to run in the calling thread, without the usual wrapper around the method.

    A signal handler could run in the wrapper after the method itself has returned. Some methods must not be interrupted
    there. Unlike other methods, a marked method must check its int and float arguments itself.
    """
    method.is_unwrapped = True  # type: ignore[attr-defined]
    return direct(method)


def _aside(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return aside(method, *arguments, **keywords)

    call.is_aside = True  # type: ignore[attr-defined]
    return direct(call)


class ClosableConnection(Protocol):
    """A connection that a forked child closes in its own process. The parent's connection stays open, and the peer does
    not see the close."""

    def close(self) -> None: ...


class OfProcess:
    """A client object that only the process that created it may use.

    In a forked child, a copy of the object raises ClientStateError for every attribute, public or not. Methods that
    were bound before the fork raise ClientStateError too. Only `close` and the end of a `with` block are allowed in the
    child; both do nothing.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name, member in list(vars(cls).items()):
            if name.startswith("_") or not isfunction(member) or hasattr(member, "is_unwrapped"):
                continue
            if not (any(is_of(member) for is_of in _NOT_CALLS) or hasattr(member, "is_direct")):
                setattr(cls, name, checked(_aside(member)))
            else:
                setattr(cls, name, checked(member))

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        _objects.add(self)
        return self


class Closing(OfProcess, ABC):
    """A client object that a `with` statement closes at the end of its block."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of a client object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def closed_on_error(close: Callable[[], object], what: str) -> Iterator[None]:
    """Call `close` if the block raises, and raise the block's error. The block finishes what was just opened.

    `what`: the object that `close` closes, for the log. An error of `close` is logged, because the block's error is the
    reason of both.
    """
    try:
        yield
    except BaseException:
        try:
            close()
        except Exception as error:
            logger.warning("closing %s after an error failed: %s", what, error)
        raise


def shared_lock() -> threading.Lock:
    """Return a lock for state that a whole process shares. The lock is free in a forked child, even if the parent held
    it."""
    lock = threading.Lock()
    _locks.append(lock)
    return lock


def close_in_child(connection: ClosableConnection) -> None:
    """Register a connection, so that a forked child closes its copy of the connection."""
    _connections.add(connection)


def in_forked_child(reset: F) -> F:
    """Register `reset`, a function that initialises shared state again. It is called in each forked child, after the
    child's copies of client objects were disabled."""
    os.register_at_fork(after_in_child=reset)
    return reset


def refuse_other_process(maker: int, what: str) -> None:
    """Raise ClientStateError if the current process is not the process `maker`. `what` names the object that `maker`
    created."""
    if os.getpid() != maker:
        raise _foreign_error(what, maker)


def _foreign_error(what: str, maker: int) -> ClientStateError:
    return ClientStateError(
        f"this {what} belongs to process {maker}, and process {os.getpid()} is a fork of that process: create a "
        f"new {what} in the forked process, after raymq.connect() there"
    )


def _foreign(kind: type, maker: int) -> type:
    """Return the class that objects of class `kind` get in a forked child. The class refuses every use of an object
    except closing. `maker`: the id of the parent process, which created the object."""

    def refuse(self: object, name: str) -> Any:
        if name == "close" or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        raise _foreign_error(kind.__name__, maker)

    def nothing(self: object, *args: object) -> None:
        """Replaces the close method of an object that was copied into a forked child process. It does nothing, because
        the parent process closes the original object."""

    async def nothing_async(self: object, *args: object) -> None:
        """Async closing method of an object's copy in a forked child. It does nothing, because the parent process
        closes the original object."""

    def call_refused(self: object, *args: object, **kwargs: object) -> Any:
        raise _foreign_error(kind.__name__, maker)

    members: dict[str, Any] = {"__slots__": (), "__getattribute__": refuse, "__module__": kind.__module__}
    for name in ("__iter__", "__aiter__", "__call__"):
        if hasattr(kind, name):
            members[name] = call_refused
    for name in ("close", "__exit__", "__aexit__"):
        if hasattr(kind, name):
            members[name] = nothing_async if iscoroutinefunction(getattr(kind, name)) else nothing
    return type(kind)(kind.__name__, (kind,), members)


def _in_child() -> None:
    """Disable all copies of the parent's client objects, in a forked child."""
    global _process_id
    maker, _process_id = _process_id, os.getpid()
    for lock in _locks:
        lock._at_fork_reinit()  # type: ignore[attr-defined]  # as threading itself does for its own locks
    classes: dict[type, type] = {}
    for item in list(_objects):
        kind = type(item)
        if kind not in classes:
            classes[kind] = _foreign(kind, maker)
        item.__class__ = classes[kind]
    _objects.clear()
    for connection in list(_connections):
        try:
            connection.close()
        # ignore a failure: the child process uses none of these connections, so it does not matter if one of them
        # cannot be closed
        except Exception:
            logger.debug("a connection copied from the parent process could not be closed", exc_info=True)
    _connections.clear()


os.register_at_fork(after_in_child=_in_child)
