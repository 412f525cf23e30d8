"""Tests of the sizes of Spark executors: parsing Spark's size notation, and fitting executors on nodes. The tests start
no process."""

from __future__ import annotations

import pytest

from raydp_jobs.executor_places import MEMORY_MIN_MIB, ExecutorSize, executor_size, memory_mib
from raymq.common.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "mib"), [("512m", 512), ("1g", 1024), ("2GB", 2048), ("600", 600), (" 1t ", 1 << 20), ("524288k", 512)]
)
def test_memory_is_read_as_spark_reads_it(text: str, mib: int) -> None:
    assert memory_mib(text) == mib


@pytest.mark.parametrize("text", ["", "lots", "1.5g", "-1g", "1 g g", f"{MEMORY_MIN_MIB - 1}m", "1k"])
def test_memory_that_spark_would_refuse_is_refused_with_a_correction(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r'"(512|450)m"'):
        memory_mib(text)


def test_an_executor_takes_the_resources_that_raydp_asks_for() -> None:
    prefix = "spark.ray.raydp_spark_executor.actor.resource"
    size = executor_size(2, 512, {f"{prefix}.cpu": "0.5", f"{prefix}.disk": "3", "spark.executor.cores": "2"})
    assert size.bundle == {"CPU": 0.5, "memory": 512 << 20, "disk": 3.0}
    assert executor_size(2, 512, {}).bundle == {"CPU": 2.0, "memory": 512 << 20}


def test_the_scarcest_resource_limits_the_executors_of_a_node() -> None:
    size = ExecutorSize(2.0, 1 << 30, (("disk", 1.0),))
    assert size.fits({"CPU": 8.0, "memory": 3 << 30, "disk": 9.0}) == 3
    assert size.fits({"CPU": 3.0, "memory": 9 << 30, "disk": 9.0}) == 1
    assert size.fits({"CPU": 8.0, "memory": 9 << 30}) == 0
    assert size.fits({}) == 0
