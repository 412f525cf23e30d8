"""The Telemetry streams of one gateway process: the commands that wait for each client, and who publishes to a topic.

A client reads its stream slowly or not at all, so few commands wait for one client. A command that finds no place is
dropped: whoever sent the command sends it again, or answers without the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

from raymq.common.errors import InvalidArgumentError, RequestTimeoutError, SystemBusyError
from raymq.gateway.calls import CallContext
from raymq.gateway.wire.messages import Resource, TelemetryCommand

COMMANDS_MAX: Final = 8
"""Maximum number of commands that wait for one client. A command may have a body of some MiB."""
TOPICS_MAX: Final = 1000
"""Maximum number of topics to which one client publishes."""


class CommandStream:
    """One open stream of a client. `topics`: the topics to which the client publishes, by stored name, with the names
    that the client uses. All methods run in the event loop."""

    def __init__(self, client_id: str, call: CallContext) -> None:
        """`call`: the authenticated call that opened the stream."""
        self.client_id, self.call = client_id, call
        self.topics: Mapping[str, Resource] = {}
        self.is_open = False
        """True after the client's settings were answered. The stream then keeps the client registered."""
        self._asked: dict[str, asyncio.Future[TelemetryCommand]] = {}
        self._commands: list[TelemetryCommand | None] = []
        """The commands that wait. A list, because the queues of asyncio take 3 KiB for each idle client."""
        self._arrived: asyncio.Future[None] | None = None
        """Done when a command has arrived; None while nobody waits."""
        self._taken: asyncio.Future[None] | None = None
        """Done when no command waits any more; None while nobody waits."""

    def offer(self, command: TelemetryCommand) -> bool:
        """Enqueue a command. Returns False, and drops the command, if COMMANDS_MAX commands wait."""
        if len(self._commands) >= COMMANDS_MAX:
            return False
        self._put(command)
        return True

    def _put(self, command: TelemetryCommand | None) -> None:
        self._commands.append(command)
        _wake(self._arrived)

    async def answer(self, command: TelemetryCommand) -> None:
        """Enqueue an answer, and wait until all commands are written. So a client that reads no answers cannot make
        more of them wait. Only one task may answer."""
        self._put(command)
        while self._commands:
            self._taken = asyncio.get_running_loop().create_future()
            try:
                await self._taken
            finally:
                self._taken = None

    async def ask(self, nonce: str, command: TelemetryCommand, timeout_s: float) -> TelemetryCommand:
        """Ask the client a question, and return its answer with the same `nonce`.

        Raises SystemBusyError if too many commands wait, and RequestTimeoutError if no answer arrives in time.
        """
        if not self.offer(command):
            raise SystemBusyError(f"client {self.client_id!r} does not read its commands")
        answer: asyncio.Future[TelemetryCommand] = asyncio.get_running_loop().create_future()
        self._asked[nonce] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise RequestTimeoutError(f"a question to client {self.client_id!r}", timeout_s) from None
        finally:
            del self._asked[nonce]

    def answered(self, nonce: str, command: TelemetryCommand) -> None:
        """Note a client's answer to a question. An answer that nobody waits for is dropped."""
        answer = self._asked.get(nonce)
        if answer is not None and not answer.done():
            answer.set_result(command)

    def end(self) -> None:
        """Let the stream end after the commands that wait."""
        self._put(None)

    async def next(self) -> TelemetryCommand | None:
        """Wait for the next command to write. Returns None at the end of the stream. Only one task may wait."""
        while not self._commands:
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        command = self._commands.pop(0)
        if not self._commands:
            _wake(self._taken)
        return command


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


class CommandStreams:
    """The open streams. The streams of a topic take turns."""

    def __init__(self) -> None:
        self._of_topic: dict[str, dict[CommandStream, None]] = {}
        """The streams that publish to each topic. The stream that waits longest for a command is first."""
        self._of_client: dict[str, dict[CommandStream, None]] = {}

    def opened(self, stream: CommandStream) -> None:
        """Note a stream whose client's settings were answered."""
        self._of_client.setdefault(stream.client_id, {})[stream] = None

    def of_client(self, client_id: str) -> CommandStream | None:
        """Return the newest stream of a client; None if it has no stream."""
        return next(reversed(self._of_client.get(client_id, {})), None)

    def published_topics(self) -> list[str]:
        """Return the stored names of all topics to which a client with a stream publishes."""
        return list(self._of_topic)

    def publishes(self, stream: CommandStream, topics: Mapping[str, Resource]) -> None:
        """Note the topics to which the client of a stream publishes from now on. Raises InvalidArgumentError if there
        are more than TOPICS_MAX."""
        if len(topics) > TOPICS_MAX:
            raise InvalidArgumentError(f"a client publishes to {len(topics)} topics; at most {TOPICS_MAX} are allowed")
        for topic in stream.topics.keys() - topics.keys():
            self._remove(topic, stream)
        for topic in topics:
            self._of_topic.setdefault(topic, {}).setdefault(stream)
        stream.topics = dict(topics)

    def closed(self, stream: CommandStream) -> None:
        """Forget a stream that has ended."""
        self.publishes(stream, {})
        own = self._of_client.get(stream.client_id, {})
        own.pop(stream, None)
        if not own:
            self._of_client.pop(stream.client_id, None)

    def turn(self, topic: str, is_allowed: Callable[[CommandStream], bool]) -> CommandStream | None:
        """Return the stream of a topic whose turn it is; None if no stream that is allowed publishes to the topic."""
        streams = self._of_topic.get(topic, {})
        stream = next(filter(is_allowed, streams), None)
        if stream is not None:
            del streams[stream]
            streams[stream] = None
        return stream

    def _remove(self, topic: str, stream: CommandStream) -> None:
        streams = self._of_topic.get(topic, {})
        streams.pop(stream, None)
        if not streams:
            self._of_topic.pop(topic, None)
