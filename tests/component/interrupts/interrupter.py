"""Raises an exception from a signal handler at each point of a call, one after another.

CPython 3.11 runs signal handlers only in the main thread, and only at certain points: after a call of C code, at the
start of a Python function, at a jump back. A trace function counts these points in raymq and the code that it calls,
and makes the signal pending just before the n-th. So the handler runs exactly where a real signal's handler would run.
The points:

    a call, a jump back     before the instruction. The handler runs in the called function, or after C code.
    the return of a         if C code called the function: a class that is instantiated, `next`, a call with *arguments.
    function                The handler runs when the C code has returned, and the result is lost.
    the start of a          if no call led to it, but an attribute, a `with`, a loop, an operator. The trace function
    function                itself raises, because the handler would have run just before.

Reading an attribute makes the signal pending: a call in the trace function would itself run the handler.
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
"""Instructions at which, or right after which, handlers run. PRECALL stands for the CALL that follows it."""
CHECKING.discard(dis.opmap.get("JUMP_BACKWARD_NO_INTERRUPT", -1))
FROM_C = {dis.opmap["CALL"], dis.opmap["CALL_FUNCTION_EX"]}
"""The caller's instruction if C code has called a function for it: a Python call is at the CACHE after its CALL."""
BY_CALL = {dis.opmap["CACHE"], *FROM_C}
"""The caller's instruction if one of CHECKING led to the function."""
RESUME = dis.opmap["RESUME"]
RESUME_CHECKS = 2
"""A RESUME with a smaller argument, of a function or a generator, checks for signals. A RESUME after an await does
not."""

UNTRACED = (
    "_weakrefset.py",
    *(
        f"{os.sep}{folder}{os.sep}"
        for folder in ("tests", "storage", "actors", "importlib", "logging", "site-packages")
    ),
)
"""Code in which no handler runs here: stand-ins of tests, servers in this process, libraries, and weak-reference
callbacks.

Python runs such a callback wherever it drops the last reference, and only prints its exceptions.
"""


PROGRAMS = os.path.join("component", "interrupts")
"""The programs that make the calls."""


class InterruptedByTestError(Exception):
    """The handler's exception, which is no RaymqError, like the exception of a time limit."""


class _Signal(int):
    """A signal's number, whose `pending` makes the signal pending when it is read, without a call."""

    pending = property(_thread.interrupt_main)


_SIGNAL = _Signal(signal.SIGUSR1)


class Interrupter:
    """Interrupts one call at its n-th point.

    With `inside`, points are only in code whose path has this part, and in code that it calls: not in the event loop
    around it. Functions named in `without` have no points.
    """

    def __init__(self, inside: str = "", without: frozenset[str] = frozenset()) -> None:
        self._inside, self._without = inside, without
        self.raises: type[BaseException] | None = None
        """The handler's exception; None for an InterruptedByTestError."""
        self._left = 0
        self.where = ""
        self.on_handled: Callable[[], None] = lambda: None
        """The handler calls this before it raises."""
        signal.signal(signal.SIGUSR1, self._handle)

    def call(self, call: Callable[[], Any], point: int) -> bool:
        """Make the call, interrupted at its `point`, from 1. Returns False if the call ended before.

        Raises the call's own error unless the call was interrupted.
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
        """Return whether the frame belongs to the program, to code in UNTRACED folders, or to code that they call."""
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
                and not (self._inside and self._is_untraced(back))  # the event loop, which gets the awaited objects
                and self._is_point(frame, "the return of")
            ):
                _SIGNAL.pending  # noqa: B018
        return self._trace

    @staticmethod
    def _looks_at_start(frame: FrameType) -> bool:
        """Return whether a function or generator checks for signals now, and no call led to it."""
        code, at, back = frame.f_code.co_code, frame.f_lasti, frame.f_back
        resumes = at >= 0 and code[at] == RESUME and code[at + 1] < RESUME_CHECKS
        return resumes and back is not None and back.f_code.co_code[back.f_lasti] not in BY_CALL

    def _is_point(self, frame: FrameType, what: str) -> bool:
        """Count a point. Returns True if the handler runs there."""
        self._left -= 1
        if self._left:
            return False
        self.where = f"{what} {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}".lstrip()
        return True
