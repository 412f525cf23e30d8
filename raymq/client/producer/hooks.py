"""Hooks that a user's program gives to a producer: functions that watch each send, or forbid it.

A `SendMessageHook` is called before a message is handed over and after its send has ended. Both calls get the same
context, in whose `value` the hook may keep a value of its own. An exception of such a hook is logged and changes
nothing. A `CheckForbiddenHook` runs before all `before_send` hooks. The caller of the send gets its exception, and
nothing is sent.

`before_send` and CheckForbiddenHooks run in the thread that sends. `after_send` runs before the send returns or its
future ends: in a sender thread of the producer, or in the sending thread if the message could not be handed over. No
hook may block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from raymq.client.producer.observers import SendObserver, SendWatch
from raymq.client.producer.results import Acknowledged, Outcome
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message, MessageQueue, SendResult
from raymq.common.shipping import deferred_kind

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SendContext:
    """One message and its send, as hooks see it.

    `queue` is the queue that was selected first; `result.queue` is the queue that stores the message. After the send,
    either `result` or `error` is set. `value` belongs to the hook.
    """

    group: str
    message: Message
    queue: MessageQueue
    result: SendResult | None = None
    error: BaseException | None = None
    value: Any = None


class SendMessageHook(Protocol):
    """Watches sends. `before_send` is called before a message is handed over, `after_send` after its send has ended."""

    def before_send(self, context: SendContext) -> None: ...

    def after_send(self, context: SendContext) -> None: ...


CheckForbiddenHook = Callable[[SendContext], None]
"""Raises an exception for a message that must not be sent."""


class SendHooks(SendObserver):
    """The hooks of one producer, as one observer of its sends."""

    watches = needs_objects = True

    def __init__(
        self, group: str, watching: Sequence[SendMessageHook], forbidding: Sequence[CheckForbiddenHook]
    ) -> None:
        """Raises InvalidArgumentError for a coroutine or generator function, because a call would run none of it."""
        self._group = group
        self._watching, self._forbidding = tuple(watching), tuple(forbidding)
        called = [*self._forbidding, *(one for hook in self._watching for one in (hook.before_send, hook.after_send))]
        for function in called:
            if kind := deferred_kind(function):
                raise InvalidArgumentError(f"send hook {function!r} is {kind}: make it a plain function")

    def begin(self, messages: Sequence[Message]) -> tuple[Sequence[Message], SendWatch | None]:
        """Return the messages as they are. The hooks see them when their queue is known."""
        return messages, _HookWatch(self._group, self._watching, self._forbidding)


class _HookWatch(SendWatch):
    """The hooks' contexts of the messages of one send."""

    def __init__(
        self, group: str, watching: Sequence[SendMessageHook], forbidding: Sequence[CheckForbiddenHook]
    ) -> None:
        self._group, self._watching, self._forbidding = group, watching, forbidding
        self._contexts: list[list[tuple[SendMessageHook, SendContext]]] = []
        """For each message, each hook with its context; empty until `selected` has called the hooks."""

    def selected(self, messages: Sequence[Message], queue: MessageQueue) -> None:
        """Call the CheckForbiddenHooks, whose exceptions refuse the send; then call each `before_send`."""
        for message in messages:
            for forbid in self._forbidding:
                forbid(SendContext(self._group, message, queue))
        if not self._watching:
            return
        self._contexts = [
            [(hook, SendContext(self._group, message, queue)) for hook in self._watching] for message in messages
        ]
        for of_message in self._contexts:
            for hook, context in of_message:
                _call(hook.before_send, context)

    def ended(self, indices: Sequence[int], outcome: Outcome) -> None:
        """Call `after_send` for the messages with these indices whose `before_send` was called."""
        if not self._contexts:
            return
        results = outcome.results() if isinstance(outcome, Acknowledged) else repeat(None)
        for index, result in zip(indices, results, strict=False):
            for hook, context in self._contexts[index]:
                context.result = result
                context.error = outcome if isinstance(outcome, BaseException) else None
                _call(hook.after_send, context)


def _call(hook: Callable[[SendContext], None], context: SendContext) -> None:
    try:
        hook(context)
    except Exception:
        logger.exception("a send hook failed for a message to %s", context.queue)
