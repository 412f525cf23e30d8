"""The error of a Spark task that was raymq's, found again in the text that Spark makes of it.

A task runs in another process, and of its exception the driver gets a text: mostly two tracebacks of two languages.
"""

from __future__ import annotations

import re
from typing import Final

from raymq.common import errors
from raymq.common.errors import RaymqError, SendUnknownError, ServiceNotAvailableError

_RAISED: Final = re.compile(rf"{re.escape(errors.__name__)}\.(\w+): (.+)")
"""The line of a Python traceback that names an exception of raymq's, and its text."""


def raymq_error(text: str) -> RaymqError | None:
    """The last error of raymq that a text of Spark's names: the outermost of a chain. None if it names none.

    It has the text of the original and its class. A class that is made of more than a text gives way to the nearest
    one above it that is not, and to ServiceNotAvailableError where no answer came in time.
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
    """True if an error of this class is made of one text, which it shows as it is."""
    try:
        return issubclass(kind, RaymqError) and str(kind("text")) == "text"
    except TypeError:
        return False
