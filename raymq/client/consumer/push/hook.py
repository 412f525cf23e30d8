"""ConsumeHook is an object whose methods are called before and after each listener call, for measuring and tracing
(spec/messaging.md §3.5, §5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raymq.common.message import MessageExt

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ConsumeContext:
    """One listener call, for use by a hook. `success` and `error` are set before `after` is called. The hook may store
    its own values in `properties`."""

    group: str
    messages: Sequence[MessageExt]
    success: bool = False
    error: str = ""
    properties: dict[str, Any] = field(default_factory=dict)


class ConsumeHook(Protocol):
    """Interface of a consume hook. The hook's methods are called in the listener's process and thread. An exception of
    a hook is logged and ignored."""

    def before(self, context: ConsumeContext) -> None:
        """Called with the messages just before the listener is called with them."""

    def after(self, context: ConsumeContext) -> None:
        """Called after the listener has returned or raised."""


def call_hooks(hooks: Sequence[ConsumeHook], name: str, context: ConsumeContext) -> None:
    """Call the method `name` ("before" or "after") of all consume hooks."""
    for hook in hooks:
        method: Callable[[ConsumeContext], None] = getattr(hook, name)
        try:
            method(context)
        except Exception:  # catch an exception in the user's hook, because it must not make the message fail
            logger.exception("consume hook %s.%s raised an exception", type(hook).__name__, name)
