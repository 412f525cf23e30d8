"""Tests of Spark sessions that are opened one after another. Each session prints nothing, and runs on the nodes of the
storage actors. Nothing remains after its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from pyspark import SparkContext
from pyspark.errors import AnalysisException, IllegalArgumentException
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

import raymq
from raydp_jobs import read_topic, session as sessions, spark_session
from raydp_jobs.executor_places import storage_nodes
from tests.support.clusters.cluster import assert_gone, user_environment
from tests.support.clusters.spark import java_processes
from tests.support.history.waiting import eventually

TOPIC = "session-orders"
MEMORY = "512m"

TWO_SESSIONS = f"""
import sys
import raymq
from pyspark.sql import SparkSession
from raydp_jobs import read_topic, spark_session

with raymq.connect(sys.argv[1]) as mq:
    for number in range(2):
        with spark_session("quiet", executor_memory="{MEMORY}") as spark:
            frame = read_topic(spark, "{TOPIC}", client=mq)
            assert sorted(row["count"] for row in frame.groupBy("tags").count().collect()) == [10, 20]
    try:
        frame.count()
    except raymq.ClientStateError as error:
        assert "has ended" in str(error), error
    else:
        raise AssertionError("a DataFrame of an ended session is read")
"""


def kill_the_driver_and_go_on() -> None:
    with spark_session("killed", executor_memory=MEMORY) as spark:
        process = SparkContext._gateway.proc
        process.kill()
        process.wait()
        spark.range(1).count()


def select_what_is_not_there() -> None:
    with spark_session("next", executor_memory=MEMORY) as spark:
        assert spark.range(7).count() == 7
        spark.range(7).select("no_such_column")


@pytest.fixture(scope="module")
def topic(mq: raymq.Client) -> str:
    mq.admin.create_topic(TOPIC, queues=2)
    with mq.producer("sessions") as producer:
        producer.send_batch([raymq.Message(TOPIC, b"x", tags="a" if number % 3 else "b") for number in range(30)])
    return TOPIC


@pytest.fixture(autouse=True)
def _nothing_is_left(mq: raymq.Client) -> Iterator[None]:
    """Check at the end of a `with` block that the cluster's CPUs and memory are free again. Also check that no
    placement group and no Java process remains."""

    def free() -> tuple[float, float]:
        resources = ray.available_resources()
        return resources.get("CPU", 0.0), resources.get("memory", 0.0)

    before = free()
    assert java_processes() == []
    unpacked = set(Path("/tmp/ray").glob("*/libcore_worker_library_java.so"))
    yield
    assert set(Path("/tmp/ray").glob("*/libcore_worker_library_java.so")) <= unpacked
    assert_gone(java_processes())
    assert [group for group in placement_group_table().values() if group["state"] != "REMOVED"] == []
    eventually(lambda: free() == before, "the resources are free again")


def test_two_sessions_in_one_process_print_nothing(mq: raymq.Client, topic: str) -> None:
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", TWO_SESSIONS, address],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_executors_are_in_bundles_beside_the_storage_actors(
    mq: raymq.Client, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = storage_nodes()
    assert nodes == {ray.get_runtime_context().get_node_id()}
    cpus = int(ray.cluster_resources()["CPU"])
    with spark_session("all", executors=1, executor_cores=cpus, executor_memory=MEMORY) as spark:
        [group] = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        assert set(group["bundles_to_node_id"].values()) == nodes
        assert ray.available_resources().get("CPU", 0) == 0
        assert read_topic(spark, topic, client=mq).count() == 30
        with pytest.raises(raymq.ClientStateError, match="only one may be open at a time"), spark_session("second"):
            pytest.fail("unreachable")
    assert caplog.messages == []


def test_a_session_with_a_killed_java_raises_and_the_next_session_works(mq: raymq.Client, topic: str) -> None:
    with pytest.raises(raymq.ClientStateError, match=r"has ended: .* killed by signal 9"):
        kill_the_driver_and_go_on()
    # A Spark error keeps its type and text after its session has ended.
    with pytest.raises(AnalysisException, match="no_such_column"):
        select_what_is_not_there()


def test_a_start_that_takes_too_long_or_fails_leaves_nothing(mq: raymq.Client) -> None:
    with (
        pytest.raises(raymq.RequestTimeoutError, match="starting Spark"),
        spark_session("late", executor_memory=MEMORY, start_timeout_s=1.0),
    ):
        pytest.fail("unreachable")
    assert_gone(java_processes())
    broken = {"spark.sql.catalogImplementation": "none-such"}
    with (
        pytest.raises(IllegalArgumentException, match="none-such"),
        spark_session("broken", executor_memory=MEMORY, configs=broken),
    ):
        pytest.fail("unreachable")


def test_the_log_reports_cpus_that_others_use(mq: raymq.Client, caplog: pytest.LogCaptureFixture) -> None:
    others = placement_group([{"CPU": ray.cluster_resources()["CPU"]}])
    try:
        assert others.wait(30)
        with (
            pytest.raises(raymq.ServiceNotAvailableError, match="other programs use the cluster"),
            spark_session("late", executor_memory=MEMORY, start_timeout_s=0.5),
        ):
            pytest.fail("unreachable")
        assert "1 of 1 executors run on nodes without a storage actor" in caplog.text
    finally:
        remove_placement_group(others)
    assert java_processes() == []


@pytest.mark.parametrize("sizes", [{"executors": 1000}, {"executor_memory": "100t"}, {"executor_cores": 1000}])
def test_executors_that_the_cluster_cannot_have_are_refused(mq: raymq.Client, sizes: dict[str, int]) -> None:
    with pytest.raises(raymq.InvalidArgumentError, match="do not fit"), spark_session("big", **sizes):  # type: ignore[arg-type]
        pytest.fail("unreachable")


def test_a_plain_spark_session_must_be_stopped_first(mq: raymq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", object())
    with pytest.raises(raymq.ClientStateError, match=r"call its stop\(\)"), spark_session("ours"):
        pytest.fail("unreachable")


def test_a_node_that_lacks_something_is_named_before_spark_starts(
    mq: raymq.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/nowhere/python")
    node = ray.get_runtime_context().get_node_id()
    with pytest.raises(raymq.ClientStateError, match=rf"node {node[:8]}: .*no Python at /nowhere/python"):
        sessions.spark_session("x", executor_memory=MEMORY).__enter__()
    assert java_processes() == []
