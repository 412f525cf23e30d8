"""The stacks of this process's threads, for administrators who ask why a consumer stands still."""

from __future__ import annotations

import sys
import threading
import traceback
from typing import Final

from raymq.common.members.questions import ThreadStack

THREADS_MAX: Final = 200
"""The most threads whose stacks are told: those that began first."""
FRAMES_MAX: Final = 60
"""The most frames of a thread: the innermost ones."""


def thread_stacks() -> tuple[ThreadStack, ...]:
    """The stacks of the threads of this process, sorted by name, but for the thread that asks. They are taken one
    after another while the threads run on."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found = [(ident, frame) for ident, frame in sys._current_frames().items() if ident != own][:THREADS_MAX]
    stacks = []
    for ident, frame in found:
        summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES_MAX, lookup_lines=False)
        frames = tuple(f"{one.filename}:{one.lineno} {one.name}" for one in reversed(summary))
        stacks.append(ThreadStack(names.get(ident, f"thread {ident}"), frames))
    return tuple(sorted(stacks, key=lambda stack: stack.name))
