"""The output of listeners: text that a listener prints in its own process, printed again by the program that started
the consumer.

In the Listener's process, an OutputBuffer copies the lines that Python code writes to standard output and standard
error. In the program, one thread per consumer (OutputPrinter) fetches these lines by long polls, and prints them with
the group, the instance and the process id, as Ray does for tasks:

    (billing/0 pid=4711) one book

A message costs no call: a long poll returns when a line was printed, or after OUTPUT_WAIT_S. The buffer is bounded. If
the listener prints faster than the program reads, the oldest lines are dropped and counted. Ray's log file of the
Listener's process still has all lines. It also has what no line break ends, and what C code or `sys.stdout.buffer`
writes, which is not copied.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, Protocol

import ray

from raymq.common.errors import RaymqError, SignedTooEarlyError
from raymq.common.parallel import start_daemon
from raymq.remoting.actor_ref import DEFAULT_TIMEOUT_S, SIGN_AGAIN_S, resolve

OUTPUT_WAIT_S: Final = 5.0
"""Maximum time in seconds that one long poll waits for a line."""
OUTPUT_CHARS_MAX: Final = 1 << 20
"""Maximum number of characters that an OutputBuffer holds. Each line counts as LINE_COST more characters."""
LINE_COST: Final = 100
"""Number of characters that a line counts in addition to its own. So a buffer of empty lines is bounded, too."""
LINE_CHARS_MAX: Final = 8192
"""Maximum number of characters of one line. A longer line is divided."""
LINES_PER_CALL_MAX: Final = 1000
CHARS_PER_CALL_MAX: Final = 1 << 16
"""Number of characters after which one call returns no further line. Ray sends small results without its object
store."""
LAST_LINES_TIMEOUT_S: Final = 2.0
"""Maximum time in seconds that `OutputPrinter.finish` waits for the last lines of an instance."""
PRINTER_END_TIMEOUT_S: Final = 5.0
"""Maximum time in seconds that `OutputPrinter.close` waits for the thread."""
_LOOK_S: Final = 0.5
"""Interval in seconds at which the printer checks that this program is still connected to Ray."""
_RETRY_S: Final = 1.0
"""Pause in seconds after a call that failed."""

logger = logging.getLogger(__name__)


class OutputLine(NamedTuple):
    """One line, without its line break. `is_error`: True if it was written to standard error."""

    is_error: bool
    text: str


class OutputPart(NamedTuple):
    """Lines from an OutputBuffer. `life` identifies the buffer's process. `next_line`: the number from which the next
    call continues. `dropped`: number of lines that were dropped before the first of `lines`."""

    life: str
    pid: int
    next_line: int
    dropped: int
    lines: tuple[OutputLine, ...]


class OutputBuffer:
    """The newest lines that this process has written, with at most `chars_max` characters, as OUTPUT_CHARS_MAX counts
    them. Thread-safe.

    If this process forks, the child's lines are not copied, because no program reads the child's copy of the buffer.
    """

    def __init__(self, chars_max: int = OUTPUT_CHARS_MAX) -> None:
        self._chars_max = chars_max
        self._life = secrets.token_hex(8)
        self._added = threading.Condition()
        self._lines: deque[OutputLine] = deque()
        self._first, self._chars = 0, 0
        self._is_forked = False
        """True in a forked child process. The buffer then accepts no line."""

    def copy_streams(self) -> None:
        """Copy all lines that Python code writes to sys.stdout and sys.stderr from now on. Call this method
        once per buffer."""
        sys.stdout = CopyingStream(sys.stdout, lambda text: self.add(OutputLine(False, text)))
        sys.stderr = CopyingStream(sys.stderr, lambda text: self.add(OutputLine(True, text)))
        os.register_at_fork(after_in_child=self._end_copying)

    def _end_copying(self) -> None:
        """Copy no further lines, in a forked child process. A thread of the parent process may have held the buffer's
        lock during the fork. The child has no such thread, so it makes a new lock."""
        self._is_forked = True
        self._added = threading.Condition()
        self._lines = deque()

    def add(self, line: OutputLine) -> None:
        """Add a line. Drops the oldest lines if the buffer is full. Does nothing in a forked child process."""
        if self._is_forked:
            return
        added = self._added
        with added:
            self._lines.append(line)
            self._chars += len(line.text) + LINE_COST
            while self._chars > self._chars_max and len(self._lines) > 1:
                self._chars -= len(self._lines.popleft().text) + LINE_COST
                self._first += 1
            added.notify_all()

    def take(self, life: str, next_line: int, wait_s: float) -> OutputPart:
        """Return lines from number `next_line` on, at most LINES_PER_CALL_MAX. Waits up to `wait_s` seconds for the
        first line. If `life` is not this process's, for example after a restart, the lines are counted from the first
        line of this process."""
        start = next_line if life == self._life else 0
        with self._added:
            self._added.wait_for(lambda: self._first + len(self._lines) > start, wait_s)
            first = max(start, self._first)
            at = first - self._first
            lines, left = [], CHARS_PER_CALL_MAX
            for line in islice(self._lines, at, at + LINES_PER_CALL_MAX):
                if left <= 0:
                    break
                lines.append(line)
                left -= len(line.text)
            return OutputPart(self._life, os.getpid(), first + len(lines), first - start, tuple(lines))


class CopyingStream:
    """A text stream that writes to another stream, and passes each complete line to `add`. Threads that print at the
    same time do not mix their lines. Thread-safe if the other stream is."""

    def __init__(self, stream: Any, add: Callable[[str], None]) -> None:
        self._stream, self._add = stream, add
        self._begun = threading.local()

    def write(self, text: str) -> int:
        """Write text to the other stream. A line is passed on when its line break is written."""
        count: int = self._stream.write(text)
        *lines, rest = (getattr(self._begun, "text", "") + text).split("\n")
        if len(rest) > LINE_CHARS_MAX:
            lines, rest = [*lines, rest], ""
        self._begun.text = rest
        for line in lines:
            for at in range(0, max(len(line), 1), LINE_CHARS_MAX):
                self._add(line[at : at + LINE_CHARS_MAX])
        return count

    def writelines(self, lines: Sequence[str]) -> None:
        """Write each text of `lines`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class OutputSource(Protocol):
    """An instance whose output an OutputPrinter prints."""

    @property
    def name(self) -> str:
        """The instance's name."""

    def start_output(self, life: str, next_line: int, wait_s: float) -> Any:
        """Start a call of the Listener's method `output`, and return Ray's reference to the OutputPart."""


@dataclass(slots=True, eq=False)
class _FollowedInstance:
    """The printer's position in the output of one instance. `label`: GROUP/INDEX. `call`: Ray's reference of the call
    whose result is awaited. `retry_s`: the monotonic time before which no call is started. `finishing`: True after
    `OutputPrinter.finish`. `calls_last`: True if `call` was started after that. `ended` is set when no more lines of
    the instance are printed."""

    source: OutputSource
    label: str
    life: str = ""
    next_line: int = 0
    retry_s: float = 0.0
    call: Any = None
    calls_last: bool = False
    finishing: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class OutputPrinter:
    """Prints the output of a consumer's instances in this program, from `start` on. Thread-safe.

    Only the printer's thread calls Listeners and writes to standard output. So a Listener that does not answer delays
    no other instance, and a blocked standard output delays `finish` and `close` only up to their limits. At most one
    long poll per instance is under way, and nothing waits for it.
    """

    def __init__(self, group: str, sources: Sequence[OutputSource]) -> None:
        self._followers = {
            source.name: _FollowedInstance(source, f"{group}/{index}") for index, source in enumerate(sources)
        }
        self._events: SimpleQueue[tuple[_FollowedInstance, Any] | None] = SimpleQueue()
        """Finished calls, and None if the thread should only look again."""
        self._closed = threading.Event()
        self._is_failing = False
        """True if this program could not write the last lines. A warning is logged only for the first such lines."""
        self._thread: threading.Thread | None = None
        """The printing thread; None before `start`, and if the interpreter shuts down and can start no thread."""

    def start(self) -> None:
        """Start to print. At the interpreter's exit, when no thread can start, nothing is printed."""
        self._thread = start_daemon(self._run, name="listener-output")

    def finish(self, name: str) -> None:
        """Print the last lines of an instance, and stop following the instance. Waits at most LAST_LINES_TIMEOUT_S;
        lines that arrive later are not printed."""
        follower = self._followers[name]
        follower.finishing = True
        self._events.put(None)
        if self._thread is not None and self._thread.is_alive():
            follower.ended.wait(LAST_LINES_TIMEOUT_S)
        follower.ended.set()

    def close(self) -> None:
        """Stop the thread, and wait at most PRINTER_END_TIMEOUT_S until it has ended: a call of Ray after the end of
        the connection would connect anew. Lines that were not fetched are not printed."""
        self._closed.set()
        self._events.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(PRINTER_END_TIMEOUT_S)

    def _run(self) -> None:
        while self._may_call():
            for follower in self._followers.values():
                self._start_call(follower)
            try:
                event = self._events.get(timeout=_LOOK_S)
            except Empty:
                continue
            if event is not None and self._may_call():
                self._receive(*event)

    def _may_call(self) -> bool:
        return not self._closed.is_set() and ray.is_initialized()

    def _start_call(self, follower: _FollowedInstance) -> None:
        """Start the instance's next call, unless one is under way. The first call after `finish` replaces a long poll
        that is under way, because the long poll may wait for seconds."""
        finishing = follower.finishing
        under_way = follower.call is not None and (follower.calls_last or not finishing)
        if under_way or follower.ended.is_set() or time.monotonic() < follower.retry_s:
            return
        try:
            wait_s = 0.0 if finishing else OUTPUT_WAIT_S
            call = follower.source.start_output(follower.life, follower.next_line, wait_s)
        except RaymqError as error:  # for example, the program has just disconnected from Ray
            self._on_failure(follower, error)
            return
        follower.call, follower.calls_last = call, finishing
        call.future().add_done_callback(lambda _: self._events.put((follower, call)))

    def _receive(self, follower: _FollowedInstance, call: Any) -> None:
        """Print the lines that a call has returned. Ignores a call that another call has replaced."""
        if call is not follower.call or follower.ended.is_set():
            return
        follower.call = None
        try:
            part: OutputPart = resolve(call, f"the output of instance {follower.source.name}", DEFAULT_TIMEOUT_S)
        except RaymqError as error:  # for example, Ray has lost the result with a node
            self._on_failure(follower, error)
            return
        self._print(follower, part)
        if follower.calls_last and not part.lines:
            follower.ended.set()

    def _on_failure(self, follower: _FollowedInstance, error: Exception) -> None:
        """Call again after _RETRY_S, because the Listener may restart. A call that must be signed again is repeated at
        once. A finishing instance is not waited for."""
        if isinstance(error, SignedTooEarlyError):
            follower.retry_s = time.monotonic() + SIGN_AGAIN_S
            return
        reason = next(iter(str(error).splitlines()), type(error).__name__)  # an error of Ray may fill a page
        logger.info("the output of instance %s is not printed now: %s", follower.source.name, reason)
        follower.retry_s = time.monotonic() + _RETRY_S
        if follower.finishing:
            follower.ended.set()

    def _print(self, follower: _FollowedInstance, part: OutputPart) -> None:
        follower.life, follower.next_line = part.life, part.next_line
        prefix = f"({follower.label} pid={part.pid}) "
        lines = list(part.lines)
        if part.dropped:
            lines.insert(0, OutputLine(True, f"[{part.dropped} lines were dropped: they were printed too fast]"))
        unwritten: OSError | None = None
        for line in lines:
            try:
                _write_line(sys.stderr if line.is_error else sys.stdout, prefix + line.text)
            except (OSError, ValueError) as error:
                if isinstance(error, ValueError) or _is_closed(error):  # ValueError: Python's stream is closed
                    logger.info("the output of listeners is no longer printed: %s", error)
                    self._closed.set()
                    return
                unwritten = error
        if unwritten is not None and not self._is_failing:
            logger.warning(
                "lines of instance %s could not be printed: %s; later lines are tried again",
                follower.source.name,
                unwritten,
            )
        self._is_failing = unwritten is not None


def _is_closed(error: OSError) -> bool:
    """Return True if a write failed because this program, or the reader of its output, has closed the output. Returns
    False for an error that may pass, such as a full disk."""
    return isinstance(error, BrokenPipeError) or error.errno == errno.EBADF


def _write_line(stream: Any, text: str) -> None:
    """Write a line to a stream of this program, whose encoding may differ from the Listener's. Characters that the
    encoding lacks are written as escapes."""
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:
        print(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding), file=stream, flush=True)
