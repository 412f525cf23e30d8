"""GatheredAcks acknowledges the messages of many clients with few calls to brokers.

RocketMQ's clients acknowledge one message with each request. For each group and broker one call is under way; the
requests that arrive before its answer go together with the next call. So a lone request does not wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Final

from raymq.client.consumer.simple.pop_steps import Place
from raymq.common.errors import RaymqError, SystemBusyError
from raymq.gateway.service.polling_receive import GroupCalls

ACKS_OF_CALL_MAX: Final = 4096
"""Maximum number of messages that one call acknowledges, unless a single request has more."""
ACKS_WAITING_MAX: Final = 100_000
"""Maximum number of messages of one group and broker that wait for a call. Further requests are refused."""


@dataclass(slots=True)
class _Request:
    """The messages of one request at one broker. `answer`: done when the messages are acknowledged."""

    places: Sequence[Place]
    answer: asyncio.Future[None]


@dataclass(slots=True)
class _Line:
    """The requests of one group and broker that wait for the next call. `size`: the number of their messages."""

    calls: GroupCalls
    requests: deque[_Request] = field(default_factory=deque)
    size: int = 0
    sender: asyncio.Task[None] | None = None

    def take(self) -> list[_Request]:
        """Remove the requests of the next call. Requests whose client has gone are acknowledged, too."""
        taken = [self.requests.popleft()]
        size = len(taken[0].places)
        while self.requests and size + len(self.requests[0].places) <= ACKS_OF_CALL_MAX:
            taken.append(self.requests.popleft())
            size += len(taken[-1].places)
        self.size -= size
        return taken


class GatheredAcks:
    """The acknowledgements of one gateway process, in its event loop."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], _Line] = {}
        """The lines with a call under way, by group and broker."""

    async def ack(self, calls: GroupCalls, topic: str, handles: Sequence[str]) -> None:
        """Acknowledge messages of a topic by their handles. Durable on return.

        Raises InvalidArgumentError if a text is not a handle, or names a broker that does not have the topic;
        SystemBusyError if too many acknowledgements wait; RaymqError if a broker does not answer in time. After an
        error, some of the messages may be acknowledged.
        """
        by_broker: dict[str, list[Place]] = {}
        for place in await calls.places(topic, handles):
            by_broker.setdefault(place[0].broker_name, []).append(place)
        await asyncio.gather(*[self._join(calls, name, places) for name, places in by_broker.items()])

    def _join(self, calls: GroupCalls, broker: str, places: Sequence[Place]) -> asyncio.Future[None]:
        """Put a request in its line, and start the line's calls if none is under way."""
        loop = asyncio.get_running_loop()
        request = _Request(places, loop.create_future())
        key = calls.group, broker
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(calls)
            line.sender = loop.create_task(self._send(key, line))
        if line.size >= ACKS_WAITING_MAX:
            request.answer.set_exception(
                SystemBusyError(f"{line.size} acknowledgements of group {calls.group!r} wait for broker {broker!r}")
            )
            return request.answer
        line.requests.append(request)
        line.size += len(places)
        return request.answer

    async def _send(self, key: tuple[str, str], line: _Line) -> None:
        """Make one call after another while requests wait."""
        try:
            while line.requests:
                await self._acknowledge(line.calls, line.take())
        finally:
            del self._lines[key]
            for request in line.requests:
                request.answer.cancel()

    async def _acknowledge(self, calls: GroupCalls, requests: list[_Request]) -> None:
        """Acknowledge the messages of some requests in one call. If the broker refuses the call, each request is sent
        alone, so that one client's handle does not fail the requests of others."""
        try:
            await calls.ack_places([place for request in requests for place in request.places])
        # the error is the answer to the requests
        except Exception as error:
            if len(requests) > 1 and isinstance(error, RaymqError) and not error.retryable:
                for request in requests:
                    await self._acknowledge(calls, [request])
                return
            for request in requests:
                if not request.answer.done():
                    # A copy for each request: each raise of one error object makes its traceback longer.
                    own = copy(error)
                    own.__cause__ = error
                    request.answer.set_exception(own)
        else:
            for request in requests:
                if not request.answer.done():
                    request.answer.set_result(None)
