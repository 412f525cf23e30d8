"""Test of a streaming query whose driver is killed: the query continues from its checkpoint. At the end its sink has
every message exactly once.

RAYMQ_CHAOS_SPARK_KILLS (default 2, 10 with RAYMQ_SOAK) is the number of kills. RAYMQ_CHAOS_SEED repeats the moments of
the kills.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import ray

import raymq
from tests.support.cases import chaos_seed
from tests.support.clusters.cluster import one_group
from tests.support.replicas.ray_replicas import RayReplicas
from tests.support.spark.batch_files import BatchFiles
from tests.support.spark.killed_driver import Driver, kill_again_and_again
from tests.support.spark.live_topic import check_sink, sending

PROGRAM = "tests.support.spark.query_program"
KILLS = int(os.environ.get("RAYMQ_CHAOS_SPARK_KILLS", "10" if os.environ.get("RAYMQ_SOAK") else "2"))
"""Number of times that the driver is killed. tests/chaos/simulation/test_stream_restarts.py kills drivers more
often."""
SETTINGS = one_group("{replicas: 2, spread: false, min_in_sync_replicas: 2}")

pytestmark = pytest.mark.timeout(180 + 30 * KILLS)


def test_a_query_with_a_killed_driver_continues_from_its_checkpoint(
    mq: raymq.Client, topic: str, tmp_path: Path
) -> None:
    seed = chaos_seed()
    sink = BatchFiles(tmp_path / "sink")
    variables = {"RAYMQ_TEST_ADDRESS": ray.get_runtime_context().gcs_address}

    def start(*end: str) -> Driver:
        return Driver(PROGRAM, tmp_path, topic, str(tmp_path), *end, variables=variables)

    RayReplicas("broker-a", 2).settled()
    with sending(mq, topic):
        kill_again_and_again(start, sink, random.Random(seed), KILLS)
    start("end").finish()
    check_sink(mq, topic, sink)
