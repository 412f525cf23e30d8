"""Helpers for tests: check many cases in one test, make an error of each class, and choose the seed of a chaos test and
how much a test repeats."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

import raymq.common.errors
from raymq.common.errors import RaymqError

Case = TypeVar("Case")

QUICK_EXAMPLES = 40
ERRORS = [kind for _, kind in inspect.getmembers(raymq.common.errors, inspect.isclass) if issubclass(kind, RaymqError)]
VALUES: dict[str, Any] = {"str": "orders", "tuple[str, ...]": ("order", "borders"), "bytes": b"5"}
"""Example values for the arguments of an error's constructor, by the argument's annotation. An argument with another
annotation gets the number 5."""


SUMMARY = "summary"
"""Name of the property with a text that pytest prints after all tests. A test records it with `record_property`. The
output of a test that passes is not shown."""


def examples(full: int) -> int:
    """Return the number of Hypothesis examples of a test: `full`, or at most 40 if RAYMQ_QUICK is 1. `make test` sets
    RAYMQ_QUICK."""
    return min(full, QUICK_EXAMPLES) if os.environ.get("RAYMQ_QUICK") == "1" else full


def rounds(short: int, soak: int) -> int:
    """Return how often a test repeats its work: `soak` in `make soak`, which sets RAYMQ_SOAK to 1, and otherwise
    `short`."""
    return soak if os.environ.get("RAYMQ_SOAK") == "1" else short


def chaos_seed() -> int:
    """Return and print the seed of a chaos test: RAYMQ_CHAOS_SEED, or a new random number if the variable is not set.

    Call this function while a test runs, never at import: the output of a failed test must show the seed.
    """
    seed = int(os.environ.get("RAYMQ_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
    print(f"RAYMQ_CHAOS_SEED={seed}")
    return seed


def check_all(cases: Iterable[Case], check: Callable[[Case], None]) -> None:
    """Call `check` with each case, and raise the errors of all failed cases as one exception group. Fails if `cases` is
    empty.

    A note on each error names the case.
    """
    count, errors = 0, []
    for case in cases:
        count += 1
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"case: {case!r}")
            errors.append(error)
    assert count, "no case to check"
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {count} cases", errors)


def any_error(kind: type[RaymqError]) -> RaymqError:
    """Return an instance of the error class `kind`. Each argument of its constructor gets some value of the
    right type."""
    if not inspect.isfunction(kind.__init__):
        return kind("it failed")
    arguments = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return kind(*(VALUES.get(argument.annotation, 5) for argument in arguments))
