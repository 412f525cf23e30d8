"""Hooks around each send (spec/messaging.md §3.5): to watch it, or to forbid it.

A `SendMessageHook` is called before a message is handed over and after its end, with one context for both, in whose
`value` it may keep something of its own. What it raises is logged and changes nothing. A `CheckForbiddenHook` runs
before those; what it raises reaches the caller of the send, and nothing is sent.

`before_send` and the check run in the thread that sends. `after_send` runs before the send returns or its future ends:
in a sender thread of the producer, or in the sending thread if the message could not be handed over. None of them may
block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

from raymq.client.producer.completion import Acknowledged, BeforeEnd, Outcome
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message, MessageQueue, SendResult
from raymq.common.shipping import deferred_kind

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SendContext:
    """One message on its way. `queue` is the one chosen at first, `result.queue` where it was stored; after the end
    either `result` or `error` is there. `value` is the hook's own."""

    group: str
    message: Message
    queue: MessageQueue
    result: SendResult | None = None
    error: BaseException | None = None
    value: Any = None


class SendMessageHook(Protocol):
    """Watches sends: `before_send` is called before a message is handed over, `after_send` after its end."""

    def before_send(self, context: SendContext) -> None: ...

    def after_send(self, context: SendContext) -> None: ...


CheckForbiddenHook = Callable[[SendContext], None]
"""Raises for a message that must not be sent."""


class SendHooks:
    """The hooks of one producer; false if it has none."""

    def __init__(
        self, group: str, watching: Sequence[SendMessageHook], forbidding: Sequence[CheckForbiddenHook]
    ) -> None:
        """InvalidArgumentError for a hook that is a coroutine or generator function: a call would run none of it."""
        self._group = group
        self._watching, self._forbidding = tuple(watching), tuple(forbidding)
        called = [*self._forbidding, *(one for hook in self._watching for one in (hook.before_send, hook.after_send))]
        for function in called:
            if kind := deferred_kind(function):
                raise InvalidArgumentError(f"send hook {function!r} is {kind}: make it a plain function")

    def __bool__(self) -> bool:
        return bool(self._watching or self._forbidding)

    def check(self, message: Message, queue: MessageQueue) -> None:
        """Call the CheckForbiddenHooks; raises what the first of them raises."""
        for forbid in self._forbidding:
            forbid(SendContext(self._group, message, queue))

    def watch(self, messages: Sequence[Message], queue: MessageQueue) -> Watched | None:
        """Call the hooks' `before_send` for each message. Returns what is to be told their ends; None if no hook
        watches."""
        if not self._watching:
            return None
        contexts = [
            [(hook, SendContext(self._group, message, queue)) for hook in self._watching] for message in messages
        ]
        for of_message in contexts:
            for hook, context in of_message:
                _call(hook.before_send, context)
        return Watched(contexts)


class Watched:
    """Messages that hooks watch; called when some of them end (Completion.before_end), it tells the hooks."""

    def __init__(
        self, contexts: Sequence[Sequence[tuple[SendMessageHook, SendContext]]], then: BeforeEnd | None = None
    ) -> None:
        self._contexts = contexts
        self._then = then

    def part(self, indices: Iterable[int], then: BeforeEnd | None) -> Watched:
        """The messages at these indices, whose ends are told to the hooks, and to `then`."""
        return Watched([self._contexts[index] for index in indices], then)

    def __call__(self, first: int, end: int, outcome: Outcome) -> None:
        results = outcome.results() if isinstance(outcome, Acknowledged) else repeat(None)
        for of_message, result in zip(self._contexts[first:end], results, strict=False):
            for hook, context in of_message:
                context.result = result
                context.error = outcome if isinstance(outcome, BaseException) else None
                _call(hook.after_send, context)
        if self._then is not None:
            self._then(first, end, outcome)


def _call(hook: Callable[[SendContext], None], context: SendContext) -> None:
    try:
        hook(context)
    except Exception:
        logger.exception("a send hook failed for a message to %s", context.queue)
