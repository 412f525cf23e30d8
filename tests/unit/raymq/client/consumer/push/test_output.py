"""Tests of the output of listeners: lines that a Listener's process prints, and the program prints again."""

from __future__ import annotations

import errno
import io
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError, RayError, RaySystemError, RuntimeEnvSetupError

from raymq.client.consumer.push import output
from raymq.client.consumer.push.output import (
    CHARS_PER_CALL_MAX,
    LINE_CHARS_MAX,
    LINE_COST,
    LINES_PER_CALL_MAX,
    CopyingStream,
    OutputBuffer,
    OutputLine,
    OutputPart,
    OutputPrinter,
)
from raymq.common.errors import RaymqError, ServiceNotAvailableError, SignedTooEarlyError
from raymq.remoting.actor_ref import HandleRef
from tests.support.clients.fakes import WAIT_S
from tests.support.history.waiting import eventually


def texts(part: OutputPart) -> list[str]:
    return [line.text for line in part.lines]


# The Listener's process


def test_lines_of_both_streams_are_copied_and_still_written(monkeypatch: pytest.MonkeyPatch) -> None:
    out, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    buffer = OutputBuffer()
    buffer.copy_streams()
    print("one", 1)
    print("two\nthree", file=sys.stderr)
    print("begun ", end="")
    assert buffer.take("", 0, 0).lines == (
        OutputLine(False, "one 1"),
        OutputLine(True, "two"),
        OutputLine(True, "three"),
    )
    print("and ended")
    assert texts(buffer.take("", 3, 0)) == ["one 1", "two", "three", "begun and ended"]
    assert out.getvalue() == "one 1\nbegun and ended\n"
    assert errors.getvalue() == "two\nthree\n"
    assert sys.stdout.writable()


def test_threads_that_print_together_do_not_mix_their_lines() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    found: list[str] = []
    stream: Any = CopyingStream(io.StringIO(), found.append)
    count = 4

    def write(number: int) -> None:
        dice = random.Random(seed + number)
        for line in range(200):
            for part in (f"{number}:", f"{line}", "\n"):
                stream.write(part)
                if dice.random() < 0.1:
                    time.sleep(0)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(found) == sorted(f"{number}:{line}" for number in range(count) for line in range(200))


def test_a_line_without_an_end_is_divided() -> None:
    found: list[str] = []
    CopyingStream(io.StringIO(), found.append).write("x" * (2 * LINE_CHARS_MAX + 5))
    assert [len(line) for line in found] == [LINE_CHARS_MAX, LINE_CHARS_MAX, 5]


def test_a_full_buffer_drops_the_oldest_lines_and_counts_them() -> None:
    buffer = OutputBuffer(chars_max=1000)
    for number in range(50):
        buffer.add(OutputLine(False, f"line {number:04}"))
    life = buffer.take("", 0, 0).life
    part = buffer.take(life, 10, 0)
    assert texts(part) == [f"line {number:04}" for number in range(50 - len(part.lines), 50)]
    assert part.dropped == 40 - len(part.lines) > 0
    assert part.next_line == 50


def test_a_call_returns_a_bounded_number_of_lines_and_the_next_call_continues() -> None:
    buffer = OutputBuffer()
    for number in range(LINES_PER_CALL_MAX + 5):
        buffer.add(OutputLine(False, str(number)))
    first = buffer.take("", 0, 0)
    assert (len(first.lines), first.pid) == (LINES_PER_CALL_MAX, os.getpid())
    assert texts(buffer.take(first.life, first.next_line, 0)) == [str(LINES_PER_CALL_MAX + n) for n in range(5)]
    assert buffer.take("another process", 7, 0).lines[0].text == "0"


def test_a_call_returns_few_of_many_long_lines() -> None:
    buffer = OutputBuffer()
    for _ in range(2 * CHARS_PER_CALL_MAX // LINE_CHARS_MAX):
        buffer.add(OutputLine(False, "x" * LINE_CHARS_MAX))
    assert len(buffer.take("", 0, 0).lines) == CHARS_PER_CALL_MAX // LINE_CHARS_MAX


def test_a_buffer_of_empty_lines_is_bounded() -> None:
    buffer = OutputBuffer(chars_max=10 * LINE_COST)
    for _ in range(50):
        buffer.add(OutputLine(False, ""))
    part = buffer.take("", 0, 0)
    assert (len(part.lines), part.dropped, part.next_line) == (10, 40, 50)


def test_a_long_poll_returns_when_a_line_is_printed() -> None:
    buffer = OutputBuffer()
    life = buffer.take("", 0, 0).life
    found: list[OutputPart] = []
    poll = threading.Thread(target=lambda: found.append(buffer.take(life, 0, WAIT_S)))
    poll.start()
    buffer.add(OutputLine(False, "now"))
    poll.join(WAIT_S)
    assert texts(found[0]) == ["now"]


FORK = """
import os, signal, sys, threading
from raymq.client.consumer.push.output import OutputBuffer

buffer = OutputBuffer()
buffer.copy_streams()
held, forked = threading.Event(), threading.Event()

def hold():
    with buffer._added:
        held.set()
        forked.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # the alarm ends the child if its print blocks
    print("of the child", flush=True)
    print("error of the child", file=sys.stderr, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
forked.set()
holder.join()
print("of the parent")
print(status, [line.text for line in buffer.take("", 0, 0).lines], file=sys.__stdout__)
"""


def test_a_forked_child_prints_although_a_thread_of_its_parent_held_the_lock() -> None:
    # From Python 3.12 on, os.fork() warns in the parent that it has threads. The warning would wait for the held lock.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S, check=False)
    assert done.stdout.splitlines() == ["of the child", "of the parent", "0 ['of the parent']"]
    assert (done.returncode, done.stderr) == (0, "error of the child\n")


# The program


class OutputCall:
    """Fake of Ray's reference to the result of a call of `Listener.output`."""

    def __init__(self, source: Source, life: str, next_line: int, wait_s: float) -> None:
        self.wait_s, self._source, self._arguments = wait_s, source, (life, next_line, wait_s)
        self._done: Future[OutputPart] = Future()

    def future(self) -> Future[OutputPart]:
        if not self._source.hangs:
            threading.Thread(target=self._run, daemon=True).start()
        return self._done

    def result(self, timeout: float) -> OutputPart:
        """Return the result, as `ray.get` does."""
        return self._done.result(0)

    def _run(self) -> None:
        try:
            if self._source.errors:
                raise self._source.errors.pop()
            if self._source.down:
                raise ServiceNotAvailableError("the Listener restarts")
            self._done.set_result(self._source.buffer.take(*self._arguments))
        except (RaymqError, RayError) as error:
            self._done.set_exception(error)


class Source:
    """Fake instance with a buffer. `down`: True if calls fail. `hangs`: True if calls get no answer. `errors`: the
    errors of the next calls. `start_errors`: the errors of the next attempts to start a call."""

    def __init__(self, name: str) -> None:
        self.name, self.buffer, self.down, self.hangs = name, OutputBuffer(), False, False
        self.errors: list[RaymqError | RayError] = []
        self.start_errors: list[RaymqError | RayError] = []
        self.calls: list[OutputCall] = []

    def start_output(self, life: str, next_line: int, wait_s: float) -> Any:
        handle = SimpleNamespace(output=SimpleNamespace(remote=self._start_output))
        return HandleRef(self.name, handle, None).start("output", life, next_line, wait_s)

    def _start_output(self, life: str, next_line: int, wait_s: float) -> OutputCall:
        if self.start_errors:
            raise self.start_errors.pop()
        self.calls.append(OutputCall(self, life, next_line, wait_s))
        return self.calls[-1]


class BlockableOutput(io.StringIO):
    """A standard output of this program. `ready`: cleared while a write blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = threading.Event()
        self.ready.set()
        self.waiting = threading.Event()

    def write(self, text: str) -> int:
        self.waiting.set()
        assert self.ready.wait(WAIT_S)
        return super().write(text)


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[BlockableOutput]:
    monkeypatch.setattr(ray, "get", OutputCall.result)
    monkeypatch.setattr(output, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(output, "_RETRY_S", 0.01)
    monkeypatch.setattr(output, "OUTPUT_WAIT_S", 0.05)
    out = BlockableOutput()
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=out, stderr=out))
    yield out
    out.ready.set()


def started(*sources: Source) -> OutputPrinter:
    """Return a printer that runs."""
    printer = OutputPrinter("g", sources)
    printer.start()
    return printer


def ended(printer: OutputPrinter, wait_s: float = WAIT_S) -> bool:
    """Wait until the printer's thread has ended. Returns False if the thread still runs after `wait_s` seconds."""
    assert printer._thread is not None
    printer._thread.join(wait_s)
    return not printer._thread.is_alive()


def test_a_printer_without_a_thread_ends_at_once(printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the interpreter's exit no thread can be started (Python 3.12)."""
    monkeypatch.setattr(output, "start_daemon", lambda function, name: None)
    source = Source("pull-g-0")
    printer = started(source)
    source.buffer.add(OutputLine(False, "at the exit"))
    printer.finish("pull-g-0")
    printer.close()
    assert (printed.getvalue(), source.calls) == ("", [])


def test_the_program_prints_the_lines_of_each_instance_with_a_prefix(printed: BlockableOutput) -> None:
    sources = [Source("pull-g-0"), Source("pull-g-7")]
    printer = started(*sources)
    sources[0].buffer.add(OutputLine(False, "hello"))
    sources[1].buffer.add(OutputLine(False, "world"))
    eventually(lambda: printed.getvalue().count("\n") == 2, "both lines")
    assert sorted(printed.getvalue().splitlines()) == [
        f"(g/0 pid={os.getpid()}) hello",
        f"(g/1 pid={os.getpid()}) world",
    ]
    printer.close()


def test_a_listener_that_restarts_is_followed_again(printed: BlockableOutput) -> None:
    source = Source("pull-g-0")
    printer = started(source)
    source.buffer.add(OutputLine(False, "first life"))
    eventually(lambda: "first life" in printed.getvalue(), "the line of the first process")
    source.down = True
    calls = len(source.calls)
    eventually(lambda: len(source.calls) > calls + 1, "calls while the process restarts")
    source.buffer = OutputBuffer()
    source.buffer.add(OutputLine(False, "second life"))
    source.down = False
    eventually(lambda: "second life" in printed.getvalue(), "the line of the second process")
    assert printed.getvalue().count("life") == 2
    printer.close()


@pytest.mark.parametrize(
    "error",
    [
        RaySystemError("disconnected"),
        RuntimeEnvSetupError("pip failed\nline 2 of its output"),
        ObjectLostError("00" * 28, "owner", "call site"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("place", ["start_errors", "errors"])
def test_an_error_of_ray_is_one_log_line_and_the_printing_goes_on(
    printed: BlockableOutput, caplog: pytest.LogCaptureFixture, error: RayError, place: str
) -> None:
    caplog.set_level("INFO")
    source = Source("pull-g-0")
    getattr(source, place).append(error)
    printer = started(source)
    source.buffer.add(OutputLine(False, "after the error"))
    eventually(lambda: "after the error" in printed.getvalue(), "the line after the error")
    printer.close()
    [record] = [record for record in caplog.records if record.name == output.__name__]
    assert record.getMessage().startswith("the output of instance pull-g-0 is not printed now: ")
    assert "\n" not in record.getMessage()
    assert record.exc_info is None


def test_the_last_lines_are_printed_before_an_instance_ends_and_once(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "OUTPUT_WAIT_S", WAIT_S)  # the long poll does not end before the instance
    source = Source("pull-g-0")
    printer = started(source)
    eventually(lambda: source.calls, "the long poll")
    for number in range(LINES_PER_CALL_MAX + 1):
        source.buffer.add(OutputLine(False, f"line {number}."))
    printer.finish("pull-g-0")
    lines = [line.partition(") ")[2] for line in printed.getvalue().splitlines()]
    assert lines == [f"line {number}." for number in range(LINES_PER_CALL_MAX + 1)]
    assert source.calls[-1].wait_s == 0
    source.buffer.add(OutputLine(False, "too late"))
    printer.finish("pull-g-0")
    assert "too late" not in printed.getvalue()
    printer.close()


def test_a_silent_instance_ends_while_its_long_poll_is_under_way(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "OUTPUT_WAIT_S", WAIT_S)
    monkeypatch.setattr(output, "LAST_LINES_TIMEOUT_S", WAIT_S)
    source = Source("pull-g-0")
    printer = started(source)
    eventually(lambda: source.calls, "the long poll")
    printer.finish("pull-g-0")
    assert [call.wait_s for call in source.calls] == [WAIT_S, 0]
    assert not source.calls[0]._done.done()
    printer.close()


def test_the_last_call_is_signed_again_if_the_listener_asks_for_it(printed: BlockableOutput) -> None:
    source = Source("pull-g-0")
    printer = started(source)
    eventually(lambda: source.calls, "the first call")
    source.errors = [SignedTooEarlyError("the process is new", "pull-g-0", b"life", 0)]
    source.buffer.add(OutputLine(False, "signed"))
    printer.finish("pull-g-0")
    assert printed.getvalue().endswith(" signed\n")
    assert source.errors == []
    printer.close()


def test_an_instance_without_an_answer_delays_its_own_end_for_a_bounded_time_and_no_other_instance(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LAST_LINES_TIMEOUT_S", 0.2)
    silent, good, gone = Source("pull-g-0"), Source("pull-g-1"), Source("pull-g-2")
    silent.hangs, gone.down = True, True
    printer = started(silent, good, gone)
    good.buffer.add(OutputLine(False, "well"))
    eventually(lambda: "well" in printed.getvalue(), "the line of the instance that answers")
    for source in (silent, good, gone):
        printer.finish(source.name)
    assert len(silent.calls) == 2
    printer.close()
    assert ended(printer)


def test_a_blocked_standard_output_delays_the_end_of_an_instance_for_a_bounded_time(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "LAST_LINES_TIMEOUT_S", 0.1)
    monkeypatch.setattr(output, "PRINTER_END_TIMEOUT_S", 0.1)
    source = Source("pull-g-0")
    printed.ready.clear()
    printer = started(source)
    source.buffer.add(OutputLine(False, "nobody reads"))
    assert printed.waiting.wait(WAIT_S)
    printer.finish("pull-g-0")
    printer.close()
    assert not ended(printer, 0)
    printed.ready.set()
    assert ended(printer)


def test_a_character_that_the_program_cannot_write_is_escaped_and_the_printing_goes_on(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    narrow = io.TextIOWrapper(written, encoding="ascii", write_through=True)
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=narrow, stderr=narrow))
    source = Source("pull-g-0")
    printer = started(source)
    source.buffer.add(OutputLine(False, "grün"))
    source.buffer.add(OutputLine(False, "plain"))
    eventually(lambda: written.getvalue().count(b"\n") == 2, "both lines")
    assert [line.partition(b") ")[2] for line in written.getvalue().splitlines()] == [b"gr\\xfcn", b"plain"]
    printer.close()


def test_a_closed_standard_output_ends_the_printing_and_nothing_else(
    printed: BlockableOutput, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = Source("pull-g-0")
    printer = OutputPrinter("g", [source])
    printed.close()
    source.buffer.add(OutputLine(False, "nobody reads"))
    printer.start()
    assert ended(printer)
    printer.finish("pull-g-0")
    printer.close()
    assert "no longer printed" in caplog.text


class FailingOutput(io.StringIO):
    """A standard output of this program. `numbers`: the error numbers of the next writes, last first."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = list(numbers)

    def write(self, text: str) -> int:
        if self.numbers:
            number = self.numbers.pop()
            raise OSError(number, os.strerror(number))
        return super().write(text)


def failing_output(monkeypatch: pytest.MonkeyPatch, *numbers: int) -> FailingOutput:
    out = FailingOutput(*numbers)
    monkeypatch.setattr(output, "sys", SimpleNamespace(stdout=out, stderr=out))
    return out


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOSPC])
def test_a_write_error_that_may_pass_is_logged_once_and_the_printing_goes_on(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    out = failing_output(monkeypatch, number, number)
    source = Source("pull-g-0")
    for text in ("lost 1", "lost 2", "printed"):
        source.buffer.add(OutputLine(False, text))
    printer = started(source)
    eventually(lambda: out.getvalue().endswith(" printed\n"), "the line after the errors", 10)
    source.buffer.add(OutputLine(False, "later"))
    eventually(lambda: out.getvalue().endswith(" later\n"), "a line of a later call")
    printer.close()
    [record] = [record for record in caplog.records if record.name == output.__name__]
    assert os.strerror(number) in record.getMessage()


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EBADF])
def test_a_write_error_of_a_closed_output_ends_the_printing(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    out = failing_output(monkeypatch, number)
    source = Source("pull-g-0")
    source.buffer.add(OutputLine(False, "nobody reads"))
    printer = started(source)
    assert ended(printer)
    printer.close()
    assert out.getvalue() == ""


def test_no_call_of_ray_follows_the_end_of_the_printer_or_of_the_connection(
    printed: BlockableOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source("pull-g-0")
    printer = started(source)
    eventually(lambda: len(source.calls) > 1, "calls of the instance")
    printer.close()
    calls = len(source.calls)
    assert ended(printer)
    monkeypatch.setattr(output.ray, "is_initialized", lambda: False)
    disconnected = started(source)
    assert ended(disconnected)
    assert len(source.calls) == calls
    disconnected.finish("pull-g-0")
    disconnected.close()
