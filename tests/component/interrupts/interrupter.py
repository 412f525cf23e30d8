"""Raises an exception from a signal handler at each point of a call, one point per run of the call.

CPython 3.11 runs signal handlers only in the main thread, and only at certain points: after a call of C code, at the
start of a Python function, at a jump back. A trace function counts these points in raymq and in the code that raymq
calls. The trace function makes the signal pending just before the n-th point. So the handler runs exactly at a point at
which the handler of a real signal could run. The points:

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

CHECKING = {
    dis.opmap[name]
    for name in dis.opmap
    if name in ("PRECALL", "CALL_FUNCTION_EX") or name.startswith(("JUMP_BACKWARD", "POP_JUMP_BACKWARD"))
}
"""Instructions at which, or immediately after which, CPython runs signal handlers. PRECALL represents the CALL after
it."""
CHECKING.discard(dis.opmap.get("JUMP_BACKWARD_NO_INTERRUPT", -1))
FROM_C = {dis.opmap["CALL"], dis.opmap["CALL_FUNCTION_EX"]}
"""Current instruction of the caller's frame if C code called the function on behalf of that instruction.

A Python function that calls another Python function directly is at the CACHE after its CALL.
"""
BY_CALL = {dis.opmap["CACHE"], *FROM_C}
"""Current instruction of the caller's frame if a call instruction in CHECKING led to the function."""
RESUME = dis.opmap["RESUME"]
RESUME_CHECKS = 2
"""A RESUME whose argument is smaller starts or continues a function or generator and checks for signals. A RESUME after
an await does not check."""

UNTRACED = (
    "_weakrefset.py",
    *(
        f"{os.sep}{folder}{os.sep}"
        for folder in ("tests", "storage", "actors", "importlib", "logging", "site-packages")
    ),
)
"""Parts of the paths of code that this test never interrupts: tests' stand-ins, servers in this process, libraries,
weak-reference callbacks.

Python runs a weak-reference callback at any place that drops the last reference, and only prints the callback's
exceptions.
"""


PROGRAMS = os.path.join("component", "interrupts")
"""Part of the paths of the test programs that make the calls to interrupt."""


class InterruptedByTestError(Exception):
    """Exception that the signal handler raises. Like the exception of a user's time limit, it is not a
    RaymqError."""


class _Signal(int):
    """A signal number with an attribute `pending`. Reading the attribute makes the signal pending without a Python
    call."""

    pending = property(_thread.interrupt_main)


_SIGNAL = _Signal(signal.SIGUSR1)


class Interrupter:
    """Interrupts one call at its n-th point.

    `inside`: count only points in code whose path contains this text, and in code called from there, not points in the
    event loop around that code. `without`: names of functions that have no points.
    """

    def __init__(self, inside: str = "", without: frozenset[str] = frozenset()) -> None:
        self._inside, self._without = inside, without
        self.raises: type[BaseException] | None = None
        """Class of the exception that the signal handler raises. None: InterruptedByTestError."""
        self._left = 0
        self.where = ""
        self.on_handled: Callable[[], None] = lambda: None
        """Function that the signal handler calls before it raises."""
        signal.signal(signal.SIGUSR1, self._handle)

    def call(self, call: Callable[[], Any], point: int) -> bool:
        """Make a call and interrupt it at point number `point`, counted from 1. Returns False if the call ended before
        that point.

        Raises the call's own error if the call was not interrupted.
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
        """Return True if the frame has no points: it belongs to a test program, to code in UNTRACED, or to code called
        from there."""
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
                # skips the event loop, to which a coroutine returns the object that it awaits
                and not (self._inside and self._is_untraced(back))
                and self._is_point(frame, "the return of")
            ):
                _SIGNAL.pending  # noqa: B018
        return self._trace

    @staticmethod
    def _looks_at_start(frame: FrameType) -> bool:
        """Return True if a function or generator checks for signals at its current instruction, and no call instruction
        led to it."""
        code, at, back = frame.f_code.co_code, frame.f_lasti, frame.f_back
        resumes = at >= 0 and code[at] == RESUME and code[at + 1] < RESUME_CHECKS
        return resumes and back is not None and back.f_code.co_code[back.f_lasti] not in BY_CALL

    def _is_point(self, frame: FrameType, what: str) -> bool:
        """Count a point of the call. Returns True if the signal handler must run at this point."""
        self._left -= 1
        if self._left:
            return False
        self.where = f"{what} {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}".lstrip()
        return True
