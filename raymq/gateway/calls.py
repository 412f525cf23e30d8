"""The calls of a gateway, between the server that carries their bytes and the service that answers them.

A server (`raymq.gateway.front`) gets a table of handlers by the names of methods, and no message. The service
(`raymq.gateway.service`) gets bytes, and no object of a server. So either can be exchanged.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from raymq.common.errors import InvalidArgumentError

LEFT_S: Final = 30.0
"""Time in seconds that a call without a deadline may take."""


@dataclass(frozen=True, slots=True)
class CallContext:
    """The circumstances of one call.

    `metadata`: the call's headers, by name in small letters. `peer`: the caller's address, as text. `deadline_s`: the
    time, by `time.monotonic`, at which the caller stops waiting. `user`: the user that signed the call; empty if access
    is off. `new_ids`: the ids of messages that this process has made for this call, so no earlier call had them.
    """

    metadata: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""
    deadline_s: float = field(default_factory=lambda: time.monotonic() + LEFT_S)
    user: str = ""
    new_ids: frozenset[str] = frozenset()

    def left_s(self) -> float:
        """Return the time in seconds until the caller stops waiting, 0 or more."""
        return max(0.0, self.deadline_s - time.monotonic())


class StreamRefusedError(InvalidArgumentError):
    """A stream of requests breaks a rule, so the server ends the stream. The text is the reason, for the caller."""


@dataclass(frozen=True, slots=True)
class UnaryCall:
    """A method with one request and one answer. The handler answers errors, too: it raises only CancelledError.

    `at_once`: returns the answer if it needs no wait, else None: then `handle` answers the same request. A server that
    calls `at_once` first needs no task for such a call. None: each answer needs a wait.
    """

    handle: Callable[[CallContext, bytes], Awaitable[bytes]]
    at_once: Callable[[CallContext, bytes], bytes | None] | None = None


@dataclass(frozen=True, slots=True)
class AnswerStream:
    """A method with one request and any number of answers. If the caller has gone, the generator is closed."""

    handle: Callable[[CallContext, bytes], AsyncGenerator[bytes, None]]


@dataclass(frozen=True, slots=True)
class BothStreams:
    """A method with any number of requests and answers. The handler raises StreamRefusedError to end the stream."""

    handle: Callable[[CallContext, AsyncIterator[bytes]], AsyncGenerator[bytes, None]]


Handlers = Mapping[str, UnaryCall | AnswerStream | BothStreams]
"""The handler of each method, by the method's path: ``/package.Service/Method``."""
