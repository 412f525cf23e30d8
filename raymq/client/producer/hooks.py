"""Hooks that a program gives to a producer: functions that observe each send, or forbid it.

A `SendMessageHook` is called before a message is enqueued for sending and after its send has completed. Both calls get
the same context; the hook may store a value of its own in the context's `value`. If a SendMessageHook raises, the
producer logs the exception and continues; only SystemExit or KeyboardInterrupt of `before_send` refuses the send. A
`CheckForbiddenHook` runs before all `before_send` hooks. If it raises, the caller of the send gets the exception, and
nothing is sent.

`before_send` and CheckForbiddenHooks run in the thread that sends. `after_send` runs before the send returns or its
future completes: in a sender thread of the producer, or in the sending thread if the message could not be enqueued. No
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
from raymq.common.parallel import contained
from raymq.common.shipping import deferred_kind

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SendContext:
    """The context of one message's send, which hooks receive.

    `queue` is the queue that was selected first; `result.queue` is the queue that stores the message. After the send,
    either `result` or `error` is set. The hook may store its own value in `value`.
    """

    group: str
    message: Message
    queue: MessageQueue
    result: SendResult | None = None
    error: BaseException | None = None
    value: Any = None


class SendMessageHook(Protocol):
    """Interface of a hook that observes sends. `before_send` is called before a message is enqueued, `after_send` after
    its send has completed."""

    def before_send(self, context: SendContext) -> None: ...

    def after_send(self, context: SendContext) -> None: ...


CheckForbiddenHook = Callable[[SendContext], None]
"""Hook that raises an exception if a message must not be sent."""


class SendHooks(SendObserver):
    """Calls all hooks of one producer; the producer uses it as a single observer of its sends."""

    watches = needs_objects = True

    def __init__(
        self, group: str, watching: Sequence[SendMessageHook], forbidding: Sequence[CheckForbiddenHook]
    ) -> None:
        """Create the observer from the hooks. Raises InvalidArgumentError if a hook is a coroutine or generator
        function, because calling it would not run its code."""
        self._group = group
        self._watching, self._forbidding = tuple(watching), tuple(forbidding)
        called = [*self._forbidding, *(one for hook in self._watching for one in (hook.before_send, hook.after_send))]
        for function in called:
            if kind := deferred_kind(function):
                raise InvalidArgumentError(f"send hook {function!r} is {kind}: make it a plain function")

    def begin(self, messages: Sequence[Message]) -> tuple[Sequence[Message], SendWatch | None]:
        """Begin to watch a send. Returns the messages unchanged, and the SendWatch that calls the send hooks later,
        when the queue of the messages is selected."""
        return messages, _HookWatch(self._group, self._watching, self._forbidding)


class _HookWatch(SendWatch):
    """Calls the hooks for the messages of one send, and keeps each hook's context for each message."""

    def __init__(
        self, group: str, watching: Sequence[SendMessageHook], forbidding: Sequence[CheckForbiddenHook]
    ) -> None:
        self._group, self._watching, self._forbidding = group, watching, forbidding
        self._contexts: list[list[tuple[SendMessageHook, SendContext]]] = []
        """For each message, a list of the hooks with their contexts. The outer list is empty until `selected` has
        called the hooks."""

    def selected(self, messages: Sequence[Message], queue: MessageQueue) -> None:
        """Call each CheckForbiddenHook, and then each `before_send`. An exception of a CheckForbiddenHook refuses the
        send."""
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
        """Call the hook's `after_send` for the messages at `indices`. Skips messages for which `before_send` was not
        called."""
        if not self._contexts:
            return
        raised: BaseException | None = None
        results = outcome.results() if isinstance(outcome, Acknowledged) else repeat(None)
        for index, result in zip(indices, results, strict=False):
            for hook, context in self._contexts[index]:
                context.result = result
                context.error = outcome if isinstance(outcome, BaseException) else None
                failure = f"a send hook raised an exception for a message to queue {context.queue}"
                raised = contained(logger, failure, hook.after_send, context) or raised
        if raised is not None:
            raise raised


def _call(hook: Callable[[SendContext], None], context: SendContext) -> None:
    try:
        hook(context)
    except Exception:
        logger.exception("a send hook raised an exception for a message to queue %s", context.queue)
