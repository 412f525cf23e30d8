"""Finds the raymq error of a Spark task in the text of the exception that Spark raises in the driver.

A task runs in another process. The driver gets only the text of the task's exception, which mostly consists of Java and
Python tracebacks.
"""

from __future__ import annotations

import re
from typing import Final

from raymq.common import errors
from raymq.common.errors import RaymqError, SendUnknownError, ServiceNotAvailableError

_RAISED: Final = re.compile(rf"{re.escape(errors.__name__)}\.(\w+): (.+)")
"""Matches the line of a Python traceback that names an exception of raymq, with the exception's text."""


def raymq_error(text: str) -> RaymqError | None:
    """Return the last raymq error in the text of a Spark exception; None if the text contains no raymq error. The last
    error of a chain is the outermost.

    The returned error has the text and the class of the original error. If that class needs more arguments than a text,
    the nearest base class that needs only a text is used. A timeout becomes a ServiceNotAvailableError.
    """
    found = _RAISED.findall(text)
    if not found:
        return None
    name, reason = found[-1]
    kind = getattr(errors, name, RaymqError)
    if issubclass(kind, SendUnknownError) or (kind.retryable and not _takes_text(kind)):
        kind = ServiceNotAvailableError
    made: RaymqError = next(one for one in kind.__mro__ if _takes_text(one))(reason.strip())
    return made


def _takes_text(kind: type) -> bool:
    """Return True if an error of this class can be created from one text, and shows this text unchanged."""
    try:
        return issubclass(kind, RaymqError) and str(kind("text")) == "text"
    except TypeError:
        return False
