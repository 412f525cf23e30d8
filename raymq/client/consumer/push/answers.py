"""The return values of listeners, and the rules that decide whether a message counts as consumed.

    None, ConsumeStatus.CONSUME_SUCCESS             consumed
    raymq.reply(…), or a list of replies and None   consumed, and answered
    ConsumeStatus.RECONSUME_LATER, ConsumeLater     not consumed: delivered again
    any other answer                                not consumed: the listener is wrong, and the reason says how

In Java, the compiler checks the enum that RocketMQ's listeners return. Python has no such check. So an undefined return
value (False, 1, "yes", the class ConsumeLater) must not count as consumed: the message would be lost without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from raymq.common.errors import ListenerError
from raymq.common.message import ConsumeStatus, MessageExt
from raymq.common.protocol.consume_result import ConsumeLater, Failure
from raymq.common.protocol.request_reply import Reply, ReplyStatistics
from raymq.common.shipping import deferred_kind

ANSWER_SHOWN_MAX: Final = 200
"""Maximum number of characters of a listener's invalid return value that the failure's reason quotes."""


class Replier(Protocol):
    """Sends the replies that listeners return (raymq.client.request.replier)."""

    def answer(self, messages: Sequence[MessageExt], answer: Reply | Sequence[object]) -> str:
        """Send the replies that a listener returned for these messages. `answer`: the listener's return value. If it is
        invalid, returns the reason; otherwise an empty string. Never raises."""

    def statistics(self) -> ReplyStatistics:
        """Return the number of replies to requests that were sent, and the number that could not be sent."""


def judge(answer: Any, messages: range, call: Any, replier: Replier | None) -> Failure | None:
    """Return None if the value that a listener returned means that the messages were consumed; otherwise return the
    failure. Sends the replies that the returned value contains.

    `messages`: the indices, in their task, of the messages with which the listener was called. `call`: the argument of
    the listener call.
    """
    if answer is None or answer is ConsumeStatus.CONSUME_SUCCESS:
        return None
    if answer is ConsumeStatus.RECONSUME_LATER:
        return Failure(messages.start, len(messages), "the listener answered RECONSUME_LATER")
    if isinstance(answer, ConsumeLater):
        return _later(answer, messages)
    if isinstance(answer, Reply | list | tuple) and replier is not None:
        wrong = replier.answer(call if isinstance(call, list) else [call], answer)
        return Failure(messages.start, len(messages), wrong, unknown=True) if wrong else None
    return Failure(messages.start, len(messages), _unknown(answer), unknown=True)


def _later(answer: ConsumeLater, messages: range) -> Failure:
    if answer.first >= len(messages):
        error = f"the listener answered {answer}, but it was called with {len(messages)} message(s)"
        return Failure(messages.start, len(messages), error, unknown=True)
    return Failure(
        messages.start + answer.first,
        len(messages) - answer.first,
        f"the listener answered {answer}",
        delay_level=answer.delay_level,
        suspend_ms=answer.suspend_ms,
    )


def _unknown(answer: Any) -> str:
    """Return the text that explains why an undefined return value of a listener counts as a failure."""
    try:
        shown = repr(answer)
    except Exception as error:  # `repr` calls the object's own __repr__, which is user code and may raise
        shown = f"an object whose repr raises {type(error).__name__}"
    shown = shown if len(shown) <= ANSWER_SHOWN_MAX else shown[:ANSWER_SHOWN_MAX] + "…"
    return (
        f"the listener returned {shown} ({type(answer).__name__}), which is not a valid answer: return None or "
        "ConsumeStatus.CONSUME_SUCCESS for a consumed message, ConsumeStatus.RECONSUME_LATER or "
        "ConsumeLater(...) to get it again, or raise"
    )


def check_listener(listener: Callable[[Any], Any], name: str) -> None:
    """Raise ListenerError if a listener cannot be called, or if calling it would run none of its code (a generator
    function or an async generator function). Coroutine functions are allowed."""
    if not callable(listener):
        raise ListenerError(f"a listener must be callable with one argument, but {name} is not callable")
    kind = deferred_kind(listener)
    if kind not in ("", "a coroutine function"):
        raise ListenerError(
            f"listener {name} is {kind}, so calling it runs none of its code. Remove `yield`: a listener must be "
            "a function or a coroutine function (async def) that returns one answer"
        )
