"""Tests of the text that encodes the plan of a repeatable write (WritePlan). Later versions of raymq must be able to
read this text."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raydp_jobs.sink.plans import KEPT, PlanDirectory, WritePlan
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


def test_the_first_plan_of_a_batch_holds_for_all_processes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        plans = [WritePlan(QUEUES, time_ms, 0) for time_ms in range(8)]
        found = list(pool.map(lambda plan: PlanDirectory(tmp_path / "new").fix("orders", 7, plan), plans))
    assert len(set(found)) == 1
    assert found[0] in plans
    assert PlanDirectory(tmp_path / "new").fix("orders", 7, WritePlan(QUEUES[:1], 9, 0)) == found[0]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["7.json"]


def test_old_plans_are_deleted(tmp_path: Path) -> None:
    directory, plan = PlanDirectory(tmp_path), WritePlan(QUEUES, None, 0, 1)
    for batch in (0, 1, KEPT):
        assert directory.fix("orders", batch, plan) == plan
    assert sorted(file.name for file in tmp_path.iterdir()) == ["1.json", f"{KEPT}.json"]


def test_a_damaged_plan_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "7.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"7\.json is not a plan"):
        PlanDirectory(tmp_path).fix("orders", 7, WritePlan(QUEUES, None, 0))
    assert (tmp_path / "7.json").read_text() == "{"
