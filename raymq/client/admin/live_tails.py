"""Live tails: show the messages of a topic as they arrive, to viewers of the console and of the gateway.

All viewers of a topic share one reader, which joins no group and begins at the ends of the queues. The reader reads at
most `rate` messages per second and counts the messages that it skips. So a busy topic costs as much as a quiet one. A
slow viewer loses the oldest of its buffered messages, and sees how many it has lost. The reader stops when its last
viewer leaves.

All code of this module runs on one event loop. Only `read` blocks, and its caller runs it in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from raymq.client.admin.messages import Arrived
from raymq.common.errors import RaymqError, SystemBusyError
from raymq.common.message import MessageExt, MessageQueue

TAIL_WAITING_MAX: Final = 500
"""Maximum number of messages that are buffered for one viewer of a live tail."""
TAIL_WAITING_BYTES_MAX: Final = 32 << 20
"""Maximum size in bytes of the records that are buffered for one viewer of a live tail. One message may be larger."""
TAIL_ROUND_S: Final = 1.0
"""Seconds between two reads of a topic for its live tail."""
TAIL_ERROR_PAUSE_S: Final = 3.0
HEARTBEAT_S: Final = 15.0
"""Seconds without messages after which the viewer of a live tail gets a heartbeat, because proxies close silent
connections."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TailEvent:
    """One update for a viewer of a live tail. It has the new messages, oldest first, and the number of skipped
    messages. It also has the error if the topic cannot be read, else ""."""

    messages: Sequence[MessageExt]
    skipped: int
    error: str


Positions = Mapping[MessageQueue, int]
Wants = Callable[[MessageExt], bool]
Read = Callable[[str, Positions | None, int], Awaitable[Arrived]]
"""Async function that reads messages from a topic. Its arguments are the topic, the positions at which to begin, and
the maximum number of messages. If the positions are None, it returns no messages, only the positions at the ends of the
queues. Raises RaymqError."""


class TooManyViewersError(SystemBusyError):
    """Raised if a live tail would exceed the limit of viewers."""


class Viewer:
    """A viewer of a topic's live tail. The viewer sees the messages for which `wants` returns True. The caller iterates
    over `events`."""

    def __init__(self, wants: Wants) -> None:
        self._wants = wants
        self._waiting: deque[tuple[MessageExt, float]] = deque()
        """The buffered messages, each with its share of the size of its read."""
        self._waiting_bytes = 0.0
        self._skipped, self._error, self._begun, self._closed = 0, "", False, False
        self._changed = asyncio.Event()

    def offer(self, batch: Arrived) -> None:
        """Buffer the messages of `batch` that the viewer of this live tail wants to see. `batch`: the messages that one
        read of the topic returned. If too many messages are buffered, the oldest are dropped."""
        share = batch.size_bytes / max(len(batch.messages), 1)
        wanted = [(message, share) for message in batch.messages if self._wants(message)]
        self._waiting += wanted
        self._waiting_bytes += len(wanted) * share
        self._skipped += batch.skipped
        while len(self._waiting) > TAIL_WAITING_MAX or (
            self._waiting_bytes > TAIL_WAITING_BYTES_MAX and len(self._waiting) > 1
        ):
            self._waiting_bytes -= self._waiting.popleft()[1]
            self._skipped += 1
        if batch.messages or batch.skipped or self._error or not self._begun:
            self._error, self._begun = "", True
            self._changed.set()

    def fail(self, error: str) -> None:
        """Show the viewer of a live tail an error, because the topic currently cannot be read."""
        if error != self._error:
            self._error = error
            self._changed.set()

    def close(self) -> None:
        """End this viewer's live tail: the iteration over `events` stops."""
        self._closed = True
        self._changed.set()

    async def events(self) -> AsyncIterator[TailEvent | None]:
        """Yield updates for the viewer until `close`. Yields None as a heartbeat after HEARTBEAT_S without an update.
        All messages that arrive after the first update, which may be empty, are shown or counted as skipped."""
        while not self._closed:
            try:
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
            except TimeoutError:
                yield None
                continue
            self._changed.clear()
            if not self._closed:
                event = TailEvent(tuple(message for message, _ in self._waiting), self._skipped, self._error)
                self._waiting.clear()
                self._waiting_bytes, self._skipped = 0.0, 0
                yield event


class _Reader:
    """Reads one topic for all viewers of its live tail, in a task on the event loop."""

    def __init__(self, topic: str, read: Read, rate: int, round_s: float) -> None:
        self._topic, self._read, self._rate, self._round_s = topic, read, rate, round_s
        self.viewers: set[Viewer] = set()
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        positions: Positions | None = None
        while True:
            pause_s = self._round_s
            try:
                batch = await self._read(self._topic, positions, self._rate)
            except RaymqError as error:
                pause_s = max(TAIL_ERROR_PAUSE_S, pause_s)
                for viewer in self.viewers:
                    viewer.fail(str(error))
            except Exception:
                logger.exception("cannot read the tail of topic %s", self._topic)
                pause_s = max(TAIL_ERROR_PAUSE_S, pause_s)
                for viewer in self.viewers:
                    viewer.fail("the topic cannot be read; see the server's log")
            else:
                positions = batch.positions
                for viewer in self.viewers:
                    viewer.offer(batch)
            await asyncio.sleep(pause_s)


class Tails:
    """All live tails of a server. Each topic has one reader and its viewers."""

    def __init__(self, read: Read, *, rate: int, max_viewers: int, limit: str, round_s: float = TAIL_ROUND_S) -> None:
        """`rate`: maximum number of messages per second that the live tail of a topic shows. `max_viewers`: maximum
        number of viewers of all topics together. `limit`: the name of this limit, for errors."""
        self._read, self._rate, self._max_viewers, self._round_s = read, rate, max_viewers, round_s
        self._limit = limit
        self._readers: dict[str, _Reader] = {}
        self._closed = False

    @property
    def viewers(self) -> int:
        """The total number of viewers, over all live tails."""
        return sum(len(reader.viewers) for reader in self._readers.values())

    def open(self, topic: str, wants: Wants) -> Viewer:
        """Return a new viewer of a topic's live tail. The caller must call `leave` at the end. Raises
        TooManyViewersError if the limit of viewers is reached, or after `close`."""
        if self._closed or self.viewers >= self._max_viewers:
            raise TooManyViewersError(
                f"{self.viewers} tails are open, as many as {self._limit} ({self._max_viewers}) allows: "
                "close one of them"
            )
        if topic not in self._readers:
            self._readers[topic] = _Reader(topic, self._read, max(1, round(self._rate * self._round_s)), self._round_s)
        viewer = Viewer(wants)
        self._readers[topic].viewers.add(viewer)
        return viewer

    def leave(self, topic: str, viewer: Viewer) -> None:
        """Remove a viewer from a topic's live tail. A second call does nothing. When the last viewer leaves, the
        topic's reader stops."""
        viewer.close()
        reader = self._readers.get(topic)
        if reader is not None and viewer in reader.viewers:
            reader.viewers.remove(viewer)
            if not reader.viewers:
                self._readers.pop(topic).task.cancel()

    def close(self) -> None:
        """End all live tails, so that a server can stop without waiting for them. After this call no live tail can be
        opened."""
        self._closed = True
        for topic, reader in list(self._readers.items()):
            for viewer in list(reader.viewers):
                self.leave(topic, viewer)
