"""Tests of the text that encodes the plan of a repeatable write (WritePlan). Later versions of raymq must be able to
read this text."""

from __future__ import annotations

import json

import pytest

from raydp_jobs.sink.plans import WritePlan
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageQueue

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

QUEUES = tuple(MessageQueue("orders", name, number) for name in ("broker-a", "broker-b") for number in range(2))
VERSION_1 = '{"version": 1, "queues": "broker-a:2;broker-b:2", "time_ms": 17, "partitions": 8}'
"""An encoded WritePlan of an earlier raymq version, whose plans did not have the field `first_queue`."""


@pytest.mark.parametrize("first_queue", [0, 3])
def test_a_plan_is_read_as_it_was_written(first_queue: int) -> None:
    plan = WritePlan(QUEUES, 17, 8, first_queue)
    assert WritePlan.decode("orders", plan.encode(), "1.json") == plan


def test_a_plan_of_an_earlier_version_begins_with_its_first_queue() -> None:
    plan = WritePlan.decode("orders", VERSION_1, "1.json")
    assert plan == WritePlan(QUEUES, 17, 8, 0)
    assert json.loads(plan.encode()) == json.loads(VERSION_1)


def test_an_earlier_version_refuses_a_plan_with_another_first_queue() -> None:
    assert json.loads(WritePlan(QUEUES, 17, 8, 3).encode())["version"] == 2


def test_a_plan_of_a_later_version_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="the plan's version is 3"):
        WritePlan.decode("orders", VERSION_1.replace('"version": 1', '"version": 3'), "1.json")
