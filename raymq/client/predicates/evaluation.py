"""Functions that call a predicate for many messages, used by the predicate's own process and by a consumer's
process."""

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
"""Maximum number of characters of an exception's text that are kept as the reason of a failure."""


class Calls(NamedTuple):
    """Result of calling a predicate for messages, in order. `decided`: the predicate has decided on this number of
    messages, from the first on.

    `failure`: why the predicate did not decide on the next message; empty if it was not called for a further message.
    `failures`: number of messages on which the predicate failed, so that `on_error` decided. `last_failure`: the reason
    of the last of these failures.
    """

    decided: int
    failure: str = ""
    failures: int = 0
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Decisions of a predicate about records. `matches`, shape (n,), has the decisions about the first n records.

    `failure`: why the predicate did not decide on the next record, if it was called for this record. `ended`: True if
    the predicate's process ended at that record, or had to be killed.
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
    """Call `function` with one message after another, until `until_s` on `clock`. Set `matches[i]` to 1 if the call
    with `messages[i]` returns a true value, else to 0.

    A message None stands for a damaged record: it matches, so that the consumer reports the damage. A message also
    matches if the function accesses its body and the body is unreadable. No call begins after `until_s`, except the
    first call. `begin(i)` is called before message i. A BaseException that is not an Exception (SystemExit …) is raised
    to the caller.
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
        except BodyUnreadableError:  # select the message, so that the consumer gets it and reports the damaged body
            matches[index] = 1
        except Exception as error:  # a user's function may raise any exception
            reason = describe(error)
            if on_error == "raise":
                return Calls(index, reason, failures, last_failure)
            matches[index] = on_error == "match"
            failures, last_failure = failures + 1, reason
    return Calls(len(messages), "", failures, last_failure)


def describe(error: BaseException) -> str:
    """Return the type and text of an exception, cut to REASON_MAX characters."""
    try:
        text = str(error)
    except Exception:  # converting a user's exception to text may fail
        text = "the exception has no text"
    return f"{type(error).__name__}: {text}"[:REASON_MAX] if text else type(error).__name__


def messages_at(data: Buffer, starts: NDArray[np.int64], broker_name: str) -> Sequence[MessageExt | None]:
    """Return the messages whose records start at `starts` in `data`, with None in place of each damaged record. Fields
    are decoded on access. A body with a wrong CRC raises BodyUnreadableError, so a predicate never decides by it."""
    messages = read_messages(data, starts, broker_name=broker_name)
    return [None if message.record_damaged else message for message in messages]


class FunctionHere:
    """Evaluates a predicate in the consumer's process, on the node of the messages. Thread-safe: only one call runs at
    a time. `timeout_s` is not enforced, because a function that hangs blocks only its own program."""

    def __init__(self, predicate: Predicate) -> None:
        assert predicate.function is not None
        self.predicate, self._function = predicate, predicate.function
        self._lock = threading.Lock()

    def evaluate(self, broker_name: str, records: LocatedRecords, until_s: float) -> Evaluated:
        """Decide if records match the predicate: as many of the records as possible until `until_s`, but at least one
        record."""
        messages = messages_at(records.data, records.starts, broker_name)
        matches = bytearray(len(messages))
        with self._lock:
            calls = call_each(self._function, messages, matches, on_error=self.predicate.on_error, until_s=until_s)
        return Evaluated(np.frombuffer(matches, np.bool_)[: calls.decided], calls.failure)
