"""Runs a function in a forked child process and returns the function's result."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

CHILD_MAX_S = 20
"""Seconds after which a child process that hangs is killed. The result of `in_child` is then an error."""


def in_child(call: Callable[[], Any]) -> Any:
    """Run `call` in a child process made by os.fork, and return its result. If `call` raises an exception, the result
    is the exception's type name and text."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(CHILD_MAX_S)
        try:
            result = call()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        with os.fdopen(write, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with status {status}: it hung, or died"
    return pickle.loads(data)


def outcome(call: Callable[[], Any]) -> str:
    """Return "ok" if the call succeeds, or else the type and text of the exception that the call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"
