"""Many cases in one test, where each case as a test of its own would cost more than what it checks; and the number of
examples that Hypothesis tries.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")

QUICK_EXAMPLES = 40


def examples(full: int) -> int:
    """The number of Hypothesis examples of a test: `full`, but at most 40 if RAYMQ_QUICK is 1, as in `make test`."""
    return min(full, QUICK_EXAMPLES) if os.environ.get("RAYMQ_QUICK") == "1" else full


def check_all(cases: Iterable[Case], check: Callable[[Case], None]) -> None:
    """Call `check` with each case, and raise the errors of all failed cases together. Without a case it fails.

    Each error has its case as a note.
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
