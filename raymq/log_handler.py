"""RaymqHandler sends the records of Python's `logging` to a topic, without ever blocking the program.

    logger.info(…) ──▶ emit: format, into a bounded buffer ──▶ one thread ──▶ Producer.send_async ──▶ topic

A record is formatted in the thread that logs, because its arguments may change afterwards. The handler's thread does
everything else. If the buffer is full, records are dropped and counted. A message in their place then states how many
records were dropped. Records of raymq and Ray themselves are not sent, because sending such a record would log the next
record. Unsent records are lost when the process ends; `flush` and `close` wait for them, for a bounded time.

A message has the formatted text as its body, the level as its tag, and the properties `logger`, `level` and `process`.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from raymq.common.closing import closed_on_error
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.message import Message, SendResult
from raymq.common.numbers import POSITIVE, bounded, checked
from raymq.common.parallel import require_daemon

if TYPE_CHECKING:
    from raymq.client.client import Client
    from raymq.client.producer.producer import Producer

OWN_LOGGERS: Final = ("raymq", "ray")
"""Loggers whose records are never sent. The records of their child loggers are not sent either."""
RECORDS_AT_ONCE: Final = 500
UNSENT_MAX: Final = 2_000
"""Maximum number of log messages in flight in the producer. This limit bounds the producer's memory."""


@dataclass(frozen=True, slots=True)
class LogStatistics:
    """Numbers of log records since the handler was created. `sent`: stored in the topic. `failed`: could not be sent
    (`last_error` is the last reason). `dropped`: not accepted, because the buffer was full or the handler closed.
    `waiting`: not sent yet."""

    sent: int
    failed: int
    dropped: int
    waiting: int
    last_error: str = ""


class RaymqHandler(logging.Handler):
    """A handler for `logging` whose records become messages of `topic`, which must exist or be created on first use.

    `client`: a connection of `raymq.connect`, which stays open when the handler is closed. Without a client the handler
    connects itself, to the Ray cluster at `address` or to the Ray cluster that it finds. It raises ClusterNotFoundError
    if it finds no cluster. `capacity`: maximum number of records that wait in memory. `flush_timeout_s`: maximum time
    in seconds that `flush` and `close` wait. Raises InvalidArgumentError for a capacity, a time or a level out of
    range. Raises ClientStateError if the interpreter is exiting, and Python 3.12 starts no thread. After an error no
    connection and no producer of the handler is left open.

    Neither logging nor closing raises an error while the cluster is unreachable: `statistics` counts the lost records.
    """

    @checked
    @bounded(capacity=POSITIVE)
    def __init__(
        self,
        topic: str,
        *,
        client: Client | None = None,
        address: str | None = None,
        level: int | str = logging.NOTSET,
        producer_group: str = "logs",
        capacity: int = 10_000,
        flush_timeout_s: float = 5.0,
    ) -> None:
        try:
            super().__init__(level)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"level must be a logging level, as a number or a name: {error}") from None
        self.topic, self.capacity, self.flush_timeout_s = topic, capacity, flush_timeout_s
        self._changed = threading.Condition()
        """Condition that guards the buffer of waiting messages, the counts of log records, and the flag that the
        handler is closing."""
        self._buffer: deque[Message] = deque()
        self._unsent = 0
        self._sent = self._failed = self._dropped = self._dropped_told = 0
        self._last_error = ""
        self._closing = False
        self._pid = os.getpid()
        self._own_client: Client | None = None
        if client is None:
            from raymq.client.client import connect

            client = self._own_client = connect(address)
        self._producer: Producer | None = None
        with closed_on_error(self._release, "a RaymqHandler"):
            self._producer = client.producer(producer_group)
            self._thread = require_daemon(self._run, name="log-handler", what="a RaymqHandler")
        atexit.register(self.close)  # close the handler before the exit handlers of the client and of Ray run

    def emit(self, record: logging.LogRecord) -> None:
        """Put a log record into the buffer for the handler's thread. Python's `logging` calls this method. Never
        blocks, and never raises an error."""
        if record.name.partition(".")[0] in OWN_LOGGERS or threading.current_thread() is self._thread:
            return
        try:
            message = self._message(self.format(record), record.levelname, record.name)
        except Exception:  # an error in formatting a log record must not reach the program that writes the record
            self.handleError(record)
            return
        with self._changed:
            if self._closing or len(self._buffer) >= self.capacity:
                self._dropped += 1
                return
            self._buffer.append(message)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all log records so far are sent or have failed, for at most `flush_timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._buffer and not self._unsent, self.flush_timeout_s)

    def close(self) -> None:
        """Stop accepting log records, send the waiting records, and stop the handler's thread, within about
        `flush_timeout_s`. Idempotent."""
        # do nothing in a forked child process: the buffered records belong to the parent process, which sends them
        if os.getpid() != self._pid:
            return
        with self._changed:
            closed, self._closing = self._closing, True
            self._changed.notify_all()
        if not closed:
            atexit.unregister(self.close)
            self._thread.join(self.flush_timeout_s)
            super().close()

    def statistics(self) -> LogStatistics:
        """Return the numbers of sent, failed, dropped and waiting log records."""
        with self._changed:
            waiting = len(self._buffer) + self._unsent
            return LogStatistics(self._sent, self._failed, self._dropped, waiting, self._last_error)

    def _message(self, text: str, level: str, logger: str) -> Message:
        properties = {"logger": logger, "level": level, "process": str(os.getpid())}
        return Message(self.topic, text.encode(errors="replace"), re.sub(r"\W", "_", level), (), properties)

    def _run(self) -> None:
        try:
            while records := self._take():
                for message in records:
                    self._send(message)
        finally:
            self._end()

    def _take(self) -> list[Message]:
        """Return the next log records as messages. If records were dropped, the first message gives their number.
        Returns an empty list after the handler is closed and all records were taken."""
        with self._changed:
            self._changed.wait_for(lambda: (self._buffer and self._unsent < UNSENT_MAX) or self._is_done())
            taken = [self._buffer.popleft() for _ in range(min(len(self._buffer), RECORDS_AT_ONCE))]
            dropped = self._dropped - self._dropped_told
            self._dropped_told = self._dropped
            self._unsent += len(taken)
            if dropped and taken:
                self._unsent += 1
                told = f"{dropped} log records were dropped: the buffer of {self.capacity} was full"
                taken.insert(0, self._message(told, "WARNING", "raymq.log_handler"))
            return taken

    def _is_done(self) -> bool:
        return self._closing and not self._buffer

    def _send(self, message: Message) -> None:
        assert self._producer is not None
        try:
            self._producer.send_async(message).add_done_callback(self._note)
        except Exception as error:  # catch all exceptions, so that the following log records are not lost
            self._count(error)

    def _note(self, future: Future[SendResult]) -> None:
        self._count(future.exception())

    def _count(self, error: BaseException | None) -> None:
        with self._changed:
            self._unsent -= 1
            if error is None:
                self._sent += 1
            else:
                self._failed += 1
                self._last_error = str(error) if isinstance(error, RaymqError) else repr(error)
            self._changed.notify_all()

    def _end(self) -> None:
        """Close the producer, which sends its buffered messages. Also close the connection if the handler
        created it."""
        until_s = time.monotonic() + self.flush_timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._unsent, max(0.0, until_s - time.monotonic()))
        self._release()

    def _release(self) -> None:
        """Close the producer and the handler's own connection, if they exist. Stores an error for `statistics`."""
        for item in (self._producer, self._own_client):
            try:
                if item is not None:
                    item.close()
            except RaymqError as error:
                with self._changed:
                    self._last_error = str(error)
