"""Raises an exception out of a signal handler at each moment of a call, one after another.

CPython 3.11 runs signal handlers in the main thread only, and there at certain instructions only: after a call, at the
start of a Python function, at a jump back. A trace function counts these instructions, in raymq and in all that it
calls, and makes the signal pending just before the n-th; so the handler runs exactly where a real signal's would.

The signal is made pending by reading an attribute: a call in the trace function would itself run the handler.
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

UNTRACED = (
    "_weakrefset.py",
    *(
        f"{os.sep}{folder}{os.sep}"
        for folder in ("tests", "storage", "actors", "importlib", "logging", "site-packages")
    ),
)
"""Code in which no handler runs here: the doubles of tests, servers that run in this process, libraries, and callbacks
of weak references, which Python calls wherever it drops the last one, and whose exceptions it only prints."""


PROGRAMS = os.path.join("component", "interrupts")
"""The programs that make the calls."""


class InterruptedByTestError(Exception):
    """The handler's exception; no RaymqError, as a time limit's."""


class _Signal(int):
    """A signal's number, whose `pending` makes the signal pending when it is read, without a call."""

    pending = property(_thread.interrupt_main)


_SIGNAL = _Signal(signal.SIGUSR1)


class Interrupter:
    """Interrupts one call at its n-th point. With `inside`, points are only in code whose path has this part, and in
    all that it calls: not in the event loop around it."""

    def __init__(self, inside: str = "") -> None:
        self._inside = inside
        self.raises: type[BaseException] | None = None
        """What the handler raises; None: an InterruptedByTestError."""
        self._left = 0
        self.where = ""
        self.on_handled: Callable[[], None] = lambda: None
        """Called by the handler before it raises."""
        signal.signal(signal.SIGUSR1, self._handle)

    def call(self, call: Callable[[], Any], point: int) -> bool:
        """Make the call, interrupted at its `point`, from 1. False if it ended before. What the call itself raises is
        raised, unless it was interrupted."""
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
        """True for code in UNTRACED folders, and for all that it calls; and for the program's own code."""
        if PROGRAMS in frame.f_code.co_filename:
            return True
        at: FrameType | None = frame
        outside = bool(self._inside)
        while at is not None and PROGRAMS not in at.f_code.co_filename and at.f_code is not Interrupter.call.__code__:
            if any(part in at.f_code.co_filename for part in UNTRACED):
                return True
            outside = outside and self._inside not in at.f_code.co_filename
            at = at.f_back
        return outside

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            if self._is_untraced(frame):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return self._trace
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in CHECKING:
            self._left -= 1
            if not self._left:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                frame.f_trace_opcodes = False
                _SIGNAL.pending  # noqa: B018  # the last thing that is done here
        return self._trace
