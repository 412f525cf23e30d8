"""Listener: the actor that runs a user's listener.

It lives on the ground floor and not among the server's actors, because it runs in the user's environment: the user's
`runtime_env`, the user's import path, which may hold packages of any name. The listener comes as bytes of cloudpickle,
pickled by value, so a function of the user's own module needs no installation on the workers.

What survives its death: nothing. Ray starts it again with the same listener; what it was working on is delivered again
by its Pull actor. `consume` is therefore called at least once per message.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import cloudpickle
import ray

from raymq.errors import ListenerError
from raymq.message import ConsumeStatus, MessageExt
from raymq.push_settings import PushSettings
from raymq.record import decode_records

MessageHandler = Callable[[MessageExt], ConsumeStatus | None]
BatchHandler = Callable[[list[MessageExt]], ConsumeStatus | None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShippedListener:
    """A listener on its way to its actors: `payload` is cloudpickle's, `takes_batch` says what it is called with."""

    payload: bytes
    takes_batch: bool
    name: str


@dataclass(frozen=True, slots=True)
class ConsumeOutcome:
    """How a run of messages went. `error` is the user's traceback when the listener raised."""

    status: ConsumeStatus
    error: str = ""


def ship(handler: Callable[[Any], Any], *, takes_batch: bool) -> ShippedListener:
    """Pickle a listener by value. ListenerError when it is not callable or cannot be pickled."""
    name = getattr(handler, "__qualname__", type(handler).__qualname__)
    if not callable(handler):
        raise ListenerError(f"a listener must be callable with one argument, {name} object is not")
    module = _user_module(handler)
    if module is not None and module.__name__ in cloudpickle.list_registry_pickle_by_value():
        module = None  # the user's own registration, which stays
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        payload = cloudpickle.dumps(handler)
    except Exception as error:  # whatever a user's object does when it is pickled
        raise ListenerError(
            f"listener {name} cannot be shipped to its actor: {error}. It must not hold locks, open files, connections "
            "or a raymq client; make those in the listener's first call"
        ) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)
    return ShippedListener(payload, takes_batch, name)


def _user_module(handler: Callable[[Any], Any]) -> ModuleType | None:
    """The user's own module or package that a listener is from; None for the standard library and installed ones."""
    owner: Any = handler
    while isinstance(owner, functools.partial):
        owner = owner.func
    owner = owner if hasattr(owner, "__qualname__") else type(owner)
    module = sys.modules.get(getattr(inspect.unwrap(owner), "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None  # __main__ goes by value anyway
    installed = [Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")]
    if any(Path(file).is_relative_to(root) for root in installed):
        return None
    # All of the package, because its modules import each other.
    return sys.modules.get(module.__name__.partition(".")[0], module)


class Listener:
    """The shell around the user's function."""

    def __init__(self, shipped: ShippedListener, settings: PushSettings) -> None:
        self._takes_batch = shipped.takes_batch
        self._name = shipped.name
        self._settings = settings
        self._handler: Any = None
        self._failure = ""
        try:
            self._handler = cloudpickle.loads(shipped.payload)
        except Exception:  # a user's module may fail in any way when it is imported here
            self._failure = traceback.format_exc()

    def ready(self) -> str:
        """Empty, or why the listener could not be loaded here."""
        return self._failure

    def consume(self, records: bytes, broker_name: str) -> ConsumeOutcome:
        """Hand a queue's messages to the listener, in order. Ends at the first that fails: all are delivered again."""
        if self._handler is None:
            return ConsumeOutcome(ConsumeStatus.RECONSUME_LATER, self._failure)
        messages = decode_records(records, broker_name=broker_name)
        wanted = [m for m in messages if self._settings.subscription(m.topic).matches(m.tags)]
        try:
            status = self._consume_batches(wanted) if self._takes_batch else self._consume_each(wanted)
        except (Exception, SystemExit):  # the user's code, and sys.exit would end the actor; they need the traceback
            _log.exception("listener %s failed", self._name)
            return ConsumeOutcome(ConsumeStatus.RECONSUME_LATER, traceback.format_exc())
        return ConsumeOutcome(status)

    def _consume_each(self, messages: Sequence[MessageExt]) -> ConsumeStatus:
        for message in messages:
            if self._handler(message) is ConsumeStatus.RECONSUME_LATER:
                return ConsumeStatus.RECONSUME_LATER
        return ConsumeStatus.CONSUME_SUCCESS

    def _consume_batches(self, messages: list[MessageExt]) -> ConsumeStatus:
        size = self._settings.batch_max
        for start in range(0, len(messages), size):
            if self._handler(messages[start : start + size]) is ConsumeStatus.RECONSUME_LATER:
                return ConsumeStatus.RECONSUME_LATER
        return ConsumeStatus.CONSUME_SUCCESS


OPTIONS: Final[dict[str, Any]] = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 0}
ListenerActor = ray.remote(**OPTIONS)(Listener)
