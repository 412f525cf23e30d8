"""Many cases in one test, where each case as a test of its own would cost more than what it checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")


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
