"""Raises an exception from a signal handler at each point of a call, one point per run of the call.

CPython 3.11 runs signal handlers only in the main thread, and only at certain points: after a call of C code, at the
start of a Python function, and at a backward jump. A trace function counts these points in raymq and in the code that
raymq calls. Just before the n-th point it makes the signal pending. So the handler runs exactly at a point at which the
handler of a real signal could run. The points:

    a call, a jump back     before the instruction. The handler runs in the called function, or after C code.
    the return of a         if C code called the function: a class that is instantiated, `next`, a call with *arguments.
    function                The handler runs when the C code has returned, and the result is lost.
    the start of a          if no call led to it, but an attribute, a `with`, a loop, an operator. The trace function
    function                itself raises, because the handler would have run just before.

The trace function makes the signal pending by reading an attribute, because a call in the trace function would itself
run the handler.
"""

from __future__ import annotations

import _thread
import dis
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from raymq.common.errors import RequestTimeoutError, SendUnknownError, ServiceNotAvailableError

REQUEST_TIMEOUTS = (RequestTimeoutError, SendUnknownError, ServiceNotAvailableError)
"""The errors of a request whose timeout expires. On a loaded machine a timeout of 50 ms may already expire before or
while the request is sent."""

CHECKING = {
    dis.opmap[name]
    for name in dis.opmap
    if name in ("PRECALL", "CALL_FUNCTION_EX") or name.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
}
"""Bytecode instructions at which, or immediately after which, CPython runs signal handlers. The set contains PRECALL
for the CALL instruction that always follows it."""
CHECKING.discard(dis.opmap.get("JUMP_BACKWARD_NO_INTERRUPT", -1))
FROM_C = {dis.opmap["CALL"], dis.opmap["CALL_FUNCTION_EX"]}
"""The bytecode instructions at which a caller's frame stops if the caller has called C code that runs a Python
function.

If a Python function calls another Python function directly, the caller's frame instead stops at the CACHE instruction
after its CALL.
"""
BY_CALL = {dis.opmap["CACHE"], *FROM_C}
"""Bytecode instructions in which a caller's frame stops while the function that it called runs. If the frame stands at
one of them, an instruction in CHECKING made the call. If the frame stands at any other instruction, Python itself
called the function, without a call instruction."""
RESUME = dis.opmap["RESUME"]
RESUME_CHECKS = 2
"""Smallest argument of a RESUME instruction that continues a function after an await; such a RESUME does not check for
signals. A smaller argument means the start of a function, or the start or continuation of a generator; such a RESUME
checks for signals."""

UNTRACED = (
    "_weakrefset.py",
    *(
        f"{os.sep}{folder}{os.sep}"
        for folder in ("tests", "storage", "actors", "importlib", "logging", "site-packages")
    ),
)
"""Parts of file paths. The test never interrupts code in files with such a path: the tests' stand-ins, servers in this
process, libraries, and weak-reference callbacks.

Python runs a weak-reference callback wherever the last reference is dropped, and only prints exceptions of the
callback.
"""


PROGRAMS = os.path.join("component", "interrupts")
"""Part of the path of each test program. The tests recognise by it which code makes the calls to interrupt."""


class InterruptedByTestError(Exception):
    """Exception that the test's signal handler raises. Like an exception of a user's signal handler, it is not a
    RaymqError."""


class _Signal(int):
    """A signal number with an attribute `pending`. Reading the attribute makes the signal pending without a Python
    call."""

    pending = property(_thread.interrupt_main)


_SIGNAL = _Signal(signal.SIGUSR1)


class Interrupter:
    """Interrupts a call at the n-th of its points. A point is a place in the code at which a signal handler could run.

    `inside`: only count points in code whose path contains this text, and in code that it calls. Points in the event
    loop that runs this code therefore do not count. `without`: names of functions that have no points.
    """

    def __init__(self, inside: str = "", without: frozenset[str] = frozenset()) -> None:
        self._inside, self._without = inside, without
        self.raises: type[BaseException] | None = None
        """Class of the exception that the signal handler raises; None means InterruptedByTestError."""
        self._left = 0
        self.where = ""
        self.on_handled: Callable[[], None] = lambda: None
        """Function that the signal handler calls before it raises the exception that interrupts the call."""
        signal.signal(signal.SIGUSR1, self._handle)

    def call(self, call: Callable[[], Any], point: int) -> bool:
        """Make a call and interrupt it at point number `point`, counted from 1. Returns False if the call ended before
        that point.

        If the call was not interrupted but raised an error, raises this error.
        """
        self._left, self.where = point, ""
        sys.settrace(self._trace)
        try:
            call()
        except InterruptedByTestError:
            return True
        except BaseException:
            if not self.where:
                raise
            return True
        finally:
            sys.settrace(None)
        return bool(self.where)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        self.on_handled()
        raise (self.raises or InterruptedByTestError)(self.where)

    def _is_untraced(self, frame: FrameType) -> bool:
        """Return True if this Python frame belongs to code in which calls are not interrupted. This is code of a test
        program, code in UNTRACED, or code that such code calls."""
        if PROGRAMS in frame.f_code.co_filename:
            return True
        at: FrameType | None = frame
        outside = bool(self._inside)
        while at is not None and PROGRAMS not in at.f_code.co_filename and at.f_code is not Interrupter.call.__code__:
            if at.f_code.co_name in self._without or any(part in at.f_code.co_filename for part in UNTRACED):
                return True
            outside = outside and self._inside not in at.f_code.co_filename
            at = at.f_back
        return outside

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            if self._is_untraced(frame):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            if self._looks_at_start(frame) and self._is_point(frame, "the start of"):
                self._handle(signal.SIGUSR1, frame)
        elif event == "opcode":
            if frame.f_code.co_code[frame.f_lasti] in CHECKING and self._is_point(frame, ""):
                frame.f_trace_opcodes = False
                _SIGNAL.pending  # noqa: B018  # the last thing that is done here
        elif event == "return" and frame.f_back is not None:
            back = frame.f_back
            if (
                back.f_code.co_code[back.f_lasti] in FROM_C
                and (argument is not None or frame.f_code.co_name == "__init__")
                # Do not interrupt a coroutine's return to the event loop. It is not the end of a call: the coroutine
                # only passes the object that it awaits to the loop.
                and not (self._inside and self._is_untraced(back))
                and self._is_point(frame, "the return of")
            ):
                _SIGNAL.pending  # noqa: B018
        return self._trace

    @staticmethod
    def _looks_at_start(frame: FrameType) -> bool:
        """Return True if the frame is at the first instruction of a function or generator, and Python checks for
        signals there. The result is False if a call instruction started the function."""
        code, at, back = frame.f_code.co_code, frame.f_lasti, frame.f_back
        resumes = at >= 0 and code[at] == RESUME and code[at + 1] < RESUME_CHECKS
        return resumes and back is not None and back.f_code.co_code[back.f_lasti] not in BY_CALL

    def _is_point(self, frame: FrameType, what: str) -> bool:
        """Count one more point at which a signal handler could run during the call. Returns True if the handler must
        run at this point."""
        self._left -= 1
        if self._left:
            return False
        self.where = f"{what} {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}".lstrip()
        return True
