"""Calling a predicate for many messages, the same way in its own process and in a consumer's."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raymq.client.predicates.predicate import OnError, Predicate
from raymq.common.errors import BodyUnreadableError
from raymq.common.message import MessageExt
from raymq.records.format.layout import Buffer
from raymq.records.format.memory_records import LocatedRecords
from raymq.records.kernels.messages import read_messages

REASON_MAX: Final = 1000
"""The most characters of an exception that are kept."""


class Calls(NamedTuple):
    """The result of calling a predicate, which has decided on the first `decided` messages.

    `failure`: why it did not decide on the next message; empty if it was not called for one, or none exists.
    `on_error` decided on `failures` of the messages, on the last of them because of `last_failure`.
    """

    decided: int
    failure: str = ""
    failures: int = 0
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The messages of some records that a predicate matches, shape (n,) for the first n records.

    `failure`: why the predicate did not decide on the record after these, if it was called. `ended`: True if its
    process ended at that record, or had to be ended.
    """

    matches: NDArray[np.bool_]
    failure: str = ""
    ended: bool = False


def call_each(
    function: Callable[[MessageExt], Any],
    messages: Sequence[MessageExt | None],
    matches: MutableSequence[int] | memoryview,
    *,
    on_error: OnError,
    until_s: float = math.inf,
    begin: Callable[[int], object] = lambda index: None,
    clock: Callable[[], float] = time.monotonic,
) -> Calls:
    """Set `matches[i]` to 1 if `function(messages[i])` is true, else to 0, for as many as there is time for.

    None stands for a damaged record: it matches, so that the consumer finds out. So does a message whose unreadable
    body the function asks for. No call begins after `until_s` on
    `clock`, but the first one does. `begin(i)` is called before message i. Only exceptions that are no Exception
    (SystemExit …) are raised.
    """
    failures, last_failure = 0, ""
    for index, message in enumerate(messages):
        if index and clock() >= until_s:
            return Calls(index, "", failures, last_failure)
        begin(index)
        if message is None:
            matches[index] = 1
            continue
        try:
            matches[index] = 1 if function(message) else 0
        except BodyUnreadableError:  # the consumer finds out
            matches[index] = 1
        except Exception as error:  # whatever a user's function raises
            reason = describe(error)
            if on_error == "raise":
                return Calls(index, reason, failures, last_failure)
            matches[index] = on_error == "match"
            failures, last_failure = failures + 1, reason
    return Calls(len(messages), "", failures, last_failure)


def describe(error: BaseException) -> str:
    """The type and text of an exception, cut to REASON_MAX characters."""
    try:
        text = str(error)
    except Exception:  # a user's exception may fail to print
        text = "it has no text"
    return f"{type(error).__name__}: {text}"[:REASON_MAX] if text else type(error).__name__


def messages_at(data: Buffer, starts: NDArray[np.int64], broker_name: str) -> Sequence[MessageExt | None]:
    """The messages whose records start at `starts` of `data`; fields are decoded when they are read, and bodies are not
    checked. None in place of each damaged one."""
    messages = read_messages(data, starts, broker_name=broker_name, check_crc=False)
    return [None if message.record_damaged else message for message in messages]


class FunctionHere:
    """Evaluates a predicate in this process, for a consumer on the node of its messages. Thread-safe: one call at a
    time. `timeout_s` does not bind it: a function that hangs holds up its own program."""

    def __init__(self, predicate: Predicate) -> None:
        assert predicate.function is not None
        self.predicate, self._function = predicate, predicate.function
        self._lock = threading.Lock()

    def evaluate(self, broker_name: str, records: LocatedRecords, until_s: float) -> Evaluated:
        """Decide about as many of the records as there is time for until `until_s`, one at least."""
        messages = messages_at(records.data, records.starts, broker_name)
        matches = bytearray(len(messages))
        with self._lock:
            calls = call_each(self._function, messages, matches, on_error=self.predicate.on_error, until_s=until_s)
        return Evaluated(np.frombuffer(matches, np.bool_)[: calls.decided], calls.failure)
