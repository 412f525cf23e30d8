"""Reads the bodies of requests, so that all of them together have bounded memory and none is read for ever.

A request takes memory from its first byte until its answer: as much as it announces, or as much as the longest body if
it announces nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from starlette.requests import Request

from raymq.common.errors import RequestTimeoutError, SystemBusyError
from raymq.gateway.wire.parsing import RequestTooLargeError

BODIES_BYTES_MAX: Final = 256 << 20
"""Maximum size in bytes of all bodies that are read or answered at the same time."""
REQUEST_OVERHEAD_BYTES: Final = 1 << 20
"""Size in bytes of a request beside its messages' bodies: names, properties, and signs of JSON."""
BODY_READ_S: Final = 60.0
"""Longest time in seconds in which a body must arrive."""


class RequestBodies:
    """The bodies of the requests of one HTTP face. `message_bytes_max`: returns the maximum size of a message's body in
    bytes."""

    def __init__(self, message_bytes_max: Callable[[], int]) -> None:
        self._message_bytes_max = message_bytes_max
        self._taken = 0

    @asynccontextmanager
    async def read(self, request: Request, messages: int = 0) -> AsyncIterator[bytes]:
        """Yield the body of a request, and hold its memory until the end of the block. `messages`: number of the
        largest messages for which the body may have space.

        Raises RequestTooLargeError if the body is too long, SystemBusyError if the bodies of other requests need the
        memory, RequestTimeoutError if the body does not arrive in time, and ClientDisconnect if the client leaves.
        """
        longest = messages * self._message_bytes_max() + REQUEST_OVERHEAD_BYTES
        announced = request.headers.get("content-length", "")
        size = int(announced) if announced.isascii() and announced.isdecimal() and len(announced) < 20 else longest
        if size > longest:
            raise _too_large(longest)
        # a single request may be longer than all bodies together if the stores allow very large messages
        if self._taken and self._taken + size > BODIES_BYTES_MAX:
            raise SystemBusyError(f"the bodies of running requests have {self._taken} bytes; try again later")
        self._taken += size
        try:
            yield await _read(request, longest)
        finally:
            self._taken -= size


async def _read(request: Request, longest: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_READ_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > longest:
                    raise _too_large(longest)
                chunks.append(chunk)
    except TimeoutError:
        raise RequestTimeoutError("the body of a request", BODY_READ_S) from None
    return b"".join(chunks)


def _too_large(longest: int) -> RequestTooLargeError:
    return RequestTooLargeError(f"the body of a request may have at most {longest} bytes: send fewer messages at once")


async def until_gone(request: Request) -> None:
    """Wait until the client of a request, whose body was read, has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
