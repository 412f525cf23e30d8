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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raymq.message import Message, MessageQueue, SendResult
from raymq.producer.encoder import Outcome

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
        self._group = group
        self._watching, self._forbidding = tuple(watching), tuple(forbidding)

    def __bool__(self) -> bool:
        return bool(self._watching or self._forbidding)

    def check(self, message: Message, queue: MessageQueue) -> None:
        """Call the CheckForbiddenHooks; raises what the first of them raises."""
        for forbid in self._forbidding:
            forbid(SendContext(self._group, message, queue))

    def watch(self, message: Message, queue: MessageQueue, outcome: Outcome) -> Outcome:
        """Call the hooks' `before_send`. Returns an outcome that calls their `after_send`, then `outcome`."""
        if not self._watching:
            return outcome
        contexts = [(hook, SendContext(self._group, message, queue)) for hook in self._watching]
        for hook, context in contexts:
            _call(hook.before_send, context)
        return _Watched(outcome, contexts)


class _Watched:
    """An outcome that tells the hooks first, then the sender."""

    def __init__(self, outcome: Outcome, contexts: list[tuple[SendMessageHook, SendContext]]) -> None:
        self._outcome, self._contexts = outcome, contexts

    def done(self) -> bool:
        return self._outcome.done()

    def set_result(self, result: SendResult) -> None:
        for hook, context in self._contexts:
            context.result = result
            _call(hook.after_send, context)
        self._outcome.set_result(result)

    def set_exception(self, exception: BaseException) -> None:
        for hook, context in self._contexts:
            context.error = exception
            _call(hook.after_send, context)
        self._outcome.set_exception(exception)


def _call(hook: Callable[[SendContext], None], context: SendContext) -> None:
    try:
        hook(context)
    except Exception:
        logger.exception("a send hook failed for a message to %s", context.queue)
