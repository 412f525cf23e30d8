"""Tests of the function that finds raymq's errors inside Spark's error texts."""

from __future__ import annotations

import pytest

from raydp_jobs.task_errors import raymq_error
from raymq.common.errors import (
    DataLossError,
    InvalidArgumentError,
    RaymqError,
    SendUnknownError,
    ServiceNotAvailableError,
    SystemBusyError,
)

OF_A_TASK = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "raymq/remoting/lane/client.py", line 12, in call
raymq.common.errors.ServiceNotAvailableError: the lane was closed

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "raymq/client/scan/range_reader.py", line 90, in _map
    raise DataLossError(f"{queue}: offsets")
raymq.common.errors.DataLossError: orders@broker-a:3: offsets 0 to 17 are not on disk (any more)

\tat org.apache.spark.api.python.BasePythonRunner
"""


def test_the_outermost_error_of_the_task_is_found() -> None:
    error = raymq_error(OF_A_TASK)
    assert type(error) is DataLossError
    assert str(error) == "orders@broker-a:3: offsets 0 to 17 are not on disk (any more)"


@pytest.mark.parametrize("text", ["", "ValueError: no", "java.io.IOException: raymq.common.errors"])
def test_other_texts_have_none(text: str) -> None:
    assert raymq_error(text) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SystemBusyError", SystemBusyError),
        ("NotMasterError", ServiceNotAvailableError),
        ("RequestTimeoutError", ServiceNotAvailableError),
        (SendUnknownError.__name__, ServiceNotAvailableError),
        ("OffsetOutOfRangeError", InvalidArgumentError),
        ("TopicNotExistError", RaymqError),
        ("ErrorOfALaterRaymq", RaymqError),
    ],
)
def test_the_class_of_a_task_error_is_restored_from_its_text(name: str, kind: type[RaymqError]) -> None:
    error = raymq_error(f"raymq.common.errors.{name}: it said so\n")
    assert type(error) is kind
    assert str(error) == "it said so"
