"""ConsumeHook is called before and after each listener call, for measuring and tracing (spec/messaging.md §3.5, §5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raymq.common.message import MessageExt

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ConsumeContext:
    """One listener call. `success` and `error` are set before `after` is called; `properties` is for the hook's use."""

    group: str
    messages: Sequence[MessageExt]
    success: bool = False
    error: str = ""
    properties: dict[str, Any] = field(default_factory=dict)


class ConsumeHook(Protocol):
    """Called in the listener's process and thread. An exception of a hook is logged, and changes nothing."""

    def before(self, context: ConsumeContext) -> None:
        """Called when the listener is about to be called."""

    def after(self, context: ConsumeContext) -> None:
        """Called when the listener has returned or raised."""


def call_hooks(hooks: Sequence[ConsumeHook], name: str, context: ConsumeContext) -> None:
    """Call the method `name` ("before" or "after") of all hooks."""
    for hook in hooks:
        method: Callable[[ConsumeContext], None] = getattr(hook, name)
        try:
            method(context)
        except Exception:  # a user's code, whose failure must not make the message fail
            logger.exception("consume hook %s.%s failed", type(hook).__name__, name)
