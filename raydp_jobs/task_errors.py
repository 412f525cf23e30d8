"""Finds the raymq error of a Spark task in the text that Spark creates from it.

A task runs in another process, and the driver only gets a text of its exception, mostly tracebacks of two languages.
"""

from __future__ import annotations

import re
from typing import Final

from raymq.common import errors
from raymq.common.errors import RaymqError, SendUnknownError, ServiceNotAvailableError

_RAISED: Final = re.compile(rf"{re.escape(errors.__name__)}\.(\w+): (.+)")
"""The line of a Python traceback that names an exception of raymq, and its text."""


def raymq_error(text: str) -> RaymqError | None:
    """Return the last error of raymq in a text of Spark, which is the outermost of a chain; None without one.

    The error has the original's text and class. A class that needs more than a text is replaced by its nearest base
    class that does not, and by ServiceNotAvailableError for a timeout.
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
    """True if an error of this class takes one text and shows it unchanged."""
    try:
        return issubclass(kind, RaymqError) and str(kind("text")) == "text"
    except TypeError:
        return False
