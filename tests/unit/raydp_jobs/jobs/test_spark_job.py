"""Tests that a job reports an error of a Spark task in one line."""

from __future__ import annotations

import pytest

from raydp_jobs.jobs.spark_job import job_error
from raymq.common.errors import DataLossError, RaymqError

OF_A_TASK = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "raymq/client/scan/range_reader.py", line 90, in _map
    raise DataLossError(f"{queue}: offsets")
raymq.common.errors.DataLossError: orders@broker-a:3: offsets 0 to 17 are not on disk (any more)
"""
OF_JAVA = """An error occurred while calling o42.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 4 times, most recent
Caused by: java.io.IOException: No space left on device
"""


def test_job_error_restores_the_error_that_raymq_raised_in_a_task() -> None:
    error = job_error(OF_A_TASK)
    assert type(error) is DataLossError
    assert str(error) == "orders@broker-a:3: offsets 0 to 17 are not on disk (any more)"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OF_JAVA, "IOException: No space left on device"),
        ("ValueError: no\nDuring handling …\nKeyError: 'x'\n", "ValueError: no"),
        ("it broke\n\tat java", "it broke"),
        ("", ""),
    ],
)
def test_any_other_error_is_one_line(text: str, reason: str) -> None:
    error = job_error(text)
    assert type(error) is RaymqError
    assert str(error) == f"Spark could not finish: {reason}"
