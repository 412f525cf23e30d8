"""What users may hang around each call of their listener, for measuring and tracing (spec/messaging.md §3.5, §5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raymq.message import MessageExt

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ConsumeContext:
    """One listener call. `success` and `error` are set before `after` is called; `properties` is the hook's own."""

    group: str
    messages: Sequence[MessageExt]
    success: bool = False
    error: str = ""
    properties: dict[str, Any] = field(default_factory=dict)


class ConsumeHook(Protocol):
    """Called in the listener's process and thread. What a hook raises is logged, and changes nothing."""

    def before(self, context: ConsumeContext) -> None:
        """The listener is about to be called."""

    def after(self, context: ConsumeContext) -> None:
        """The listener has returned or raised."""


def call_hooks(hooks: Sequence[ConsumeHook], name: str, context: ConsumeContext) -> None:
    """Call `before` or `after` of all."""
    for hook in hooks:
        method: Callable[[ConsumeContext], None] = getattr(hook, name)
        try:
            method(context)
        except Exception:  # a user's code, which must not decide over the message
            logger.exception("consume hook %s.%s failed", type(hook).__name__, name)
