"""One error of each of raymq's error classes, for tests of how errors are sent from servers to clients."""

from __future__ import annotations

import inspect
from typing import Any

import raymq.common.errors
from raymq.common.errors import RaymqError

ERRORS = [kind for _, kind in inspect.getmembers(raymq.common.errors, inspect.isclass) if issubclass(kind, RaymqError)]
VALUES: dict[str, Any] = {"str": "orders", "tuple[str, ...]": ("order", "borders"), "bytes": b"5"}
"""A value for an argument of an error, by the argument's annotation. Every other argument gets the number 5."""


def any_error(kind: type[RaymqError]) -> RaymqError:
    """Return an error of the class `kind`, with a value of the right type for each argument."""
    if not inspect.isfunction(kind.__init__):
        return kind("it failed")
    arguments = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return kind(*(VALUES.get(argument.annotation, 5) for argument in arguments))
