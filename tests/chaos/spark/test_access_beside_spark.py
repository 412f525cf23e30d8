"""Tests of access control in a cluster that also runs Spark, Ray Data, Ray Serve, push consumers, predicates and the
console.

raymq's actors refuse a user without rights. The actors of RayDP, Ray Serve and Ray do not check raymq's users.
`FOREIGN` lists these actors, and docs/access.md describes the data that each of them returns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from pyspark.sql import SparkSession
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.schema import TaskProcessorConfig
from ray.serve.task_consumer import task_consumer, task_handler
from raydp.spark.dataset import _recoverable_rdd_ids

import raymq
from raydp_jobs import read_topic, spark_session
from raymq.serve import RaymqAdapterConfig, RaymqLagPolicy
from tests.support.clusters.access import (
    CALL_S,
    Program,
    access_cluster,
    all_own_kinds_run,
    as_user,
    class_of,
    consume_with_predicates,
    named_actors,
    served,
)
from tests.support.clusters.cluster import Sandbox
from tests.support.clusters.page_example import DOCS
from tests.support.history.waiting import eventually

# Pickle this module by value, because Ray's workers cannot import test modules.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Ignore a warning that ray.data.from_spark causes.
pytestmark = pytest.mark.filterwarnings("ignore:DataFrame.sql_ctx is an internal property")
TEAM, OTHER = (raymq.Credentials(name, f"the secret of {name}") for name in ("orders-team", "other-team"))
USERS = f"""
users:
  - name: {TEAM.user}
    secret: {TEAM.secret}
    policies:
      - {{resource: "Topic:orders", actions: [Pub, Sub]}}
      - {{resource: "Group:billing*", actions: [Sub]}}
  - name: {OTHER.user}
    secret: {OTHER.secret}
    policies: []
"""
BODIES = [b"order %d" % number for number in range(20)]
FOREIGN = {
    "RayDPSparkMaster": "starts and stops the session, and gives whoever asks the objects that were left with it",
    "RayAppMaster": "knows the executors and no client of raymq; it only exists with ray_data=True",
    "RayDPExecutor": "gives whoever asks the rows that ray.data.from_spark caches, and its tasks have the user's key",
    "ServeController": "deploys what it is given, and runs autoscaling policies such as RaymqLagPolicy in its process",
    "ServeReplica": "runs its handlers for whoever calls, as the user of the deployment",
    "_AutoscalingCoordinatorActor": "adds up the resources that Ray Data asks for; it sees no rows",
    "_StatsActor": "keeps the figures of Ray Data's executions; it sees no rows",
    "ProxyActor": "passes HTTP requests on to replicas; no client of raymq is in its process",
}
"""Actor classes that do not belong to raymq. For each class: the access that it gives to any program that can reach the
cluster."""
PAGE = "access.md"
BODY_SCHEMA = '{"fields": [{"name": "body", "nullable": true, "type": {"name": "binary"}, "children": []}]}'
"""Arrow schema of a single column, `body`, as JSON for Arrow's Java library."""
SHOWN = "the value of a variable"
CONFIG = TaskProcessorConfig(
    queue_name="jobs", adapter="raymq.serve.RaymqTaskProcessorAdapter", adapter_config=RaymqAdapterConfig()
)


@pytest.fixture(scope="module")
def mq(box: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Iterator[raymq.Client]:
    """Run a cluster with access control, and send 20 messages. Yields the super user's client."""
    with access_cluster(box, tmp_path_factory.mktemp("access"), USERS) as client:
        client.admin.create_topic("orders", 2)
        with client.producer() as producer:
            producer.send_batch([raymq.Message("orders", body) for body in BODIES])
        yield client


@pytest.fixture(scope="module")
def spark(mq: raymq.Client, box: Sandbox) -> Iterator[SparkSession]:
    """Yield a Spark session whose driver's JVM joins the Ray cluster, so that RayDP starts all of its kinds of
    actors."""
    # Choose the temporary directory of the JVMs. Ray kills JVMs, and a killed JVM leaves its unpacked libraries in this
    # directory.
    temporary = f"-Djava.io.tmpdir={box.java}"
    roles = ("spark.driver", "spark.executor", "spark.ray.raydp_app_master")
    configs = {f"{role}.extraJavaOptions": temporary for role in roles}
    with spark_session("access", executor_memory="512m", ray_data=True, configs=configs) as session:
        yield session


@pytest.fixture(scope="module")
def deployment(mq: raymq.Client) -> Iterator[None]:
    """Run a Ray Serve deployment that processes tasks. Its autoscaling policy requests the queue's lag from
    raymq."""

    # The class is nested so that it is pickled by value, because the deployment's replicas cannot import test modules.
    policy = AutoscalingPolicy(
        policy_function=RaymqLagPolicy, policy_kwargs={"queue_name": "jobs", "poll_interval_s": 0.5}
    )
    scaling = AutoscalingConfig(min_replicas=1, max_replicas=2, policy=policy)

    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"RAYMQ_TEST_SHOWN": SHOWN}}}

    @serve.deployment(max_ongoing_requests=8, ray_actor_options=options, autoscaling_config=scaling)
    @task_consumer(task_processor_config=CONFIG)
    class Jobs:
        @task_handler
        def double(self, number: int) -> int:
            return 2 * number

    serve.start(proxy_location="HeadOnly", http_options={"port": 0})
    try:
        serve.run(Jobs.bind(), name="jobs", route_prefix="/jobs")
        yield
    finally:
        serve.shutdown()


def test_no_named_actor_of_raymq_serves_a_user_without_rights_whatever_runs_beside_it(
    mq: raymq.Client, spark: SparkSession, deployment: None, tmp_path: Path
) -> None:
    orders = ray.data.from_spark(read_topic(spark, "orders", client=mq).select("body"))
    assert sorted(row["body"] for row in orders.take_all()) == sorted(BODIES)
    stop = tmp_path / "stop"
    program = Program.remote(TEAM)
    reference = program.run.remote(consume_with_predicates("orders", "billing-named", stop))
    try:

        def all_run() -> bool:
            if ray.wait([reference], timeout=0)[0]:
                ray.get(reference)  # `ray.get` raises the error of a program that failed.
            return all_own_kinds_run()

        eventually(all_run, "an actor of each kind runs")
        assert as_user(OTHER, served(FOREIGN)) == []
        classes = {class_of(handle) for handle in named_actors().values()}
    finally:
        stop.touch()
    assert ray.get(reference, timeout=CALL_S) > 0
    ray.kill(program)
    assert FOREIGN.keys() <= classes, "an actor of each class of FOREIGN runs"


def test_foreign_actors_give_users_without_rights_what_the_docs_state(
    mq: raymq.Client, spark: SparkSession, deployment: None
) -> None:
    frame = read_topic(spark, "orders", client=mq).select("body")
    kept = ray.data.from_spark(frame)
    rows = as_user(OTHER, cached_rows(_recoverable_rdd_ids[frame], frame.rdd.getNumPartitions()))
    assert sorted(row["body"] for row in rows) == sorted(BODIES)
    assert kept.count() == len(BODIES)
    assert as_user(OTHER, lambda client: serve.get_app_handle("jobs").double.remote(21).result(timeout_s=60)) == 42
    assert SHOWN in as_user(OTHER, lambda client: options_of_deployments())
    section = (DOCS / PAGE).read_text().partition("## Actors that raymq does not check\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == FOREIGN.keys()


def cached_rows(rdd_id: int, partitions: int) -> Any:
    """Return a function that fetches the partitions of an RDD from each RayDP executor, as RayDP's own tasks
    do."""

    def work(client: raymq.Client) -> list[dict[str, bytes]]:
        import pyarrow as pa

        executors = [handle for handle in named_actors().values() if class_of(handle) == "RayDPExecutor"]
        # `set_load_code_from_local` allows Python to call Java actors. Get all actor handles before this call: a handle
        # that is created later needs the actor's module, which a user's program does not have.
        ray._private.worker.global_worker.set_load_code_from_local(True)
        rows: list[dict[str, bytes]] = []
        for handle in executors:
            for partition in range(partitions):
                data = ray.get(handle.getRDDPartition.remote(rdd_id, partition, BODY_SCHEMA, ""), timeout=CALL_S)
                rows += pa.ipc.open_stream(pa.BufferReader(data)).read_all().to_pylist()
        return rows

    return work


def options_of_deployments() -> str:
    """Return, as text, all details about deployments that Ray Serve's controller returns to any program."""
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    return str(ray.get(controller.get_serve_instance_details.remote(), timeout=CALL_S))
