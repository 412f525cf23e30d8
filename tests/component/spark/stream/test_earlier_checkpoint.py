"""Test of an old checkpoint: a streaming query continues from a checkpoint that an older raymq wrote, before raymq's
modules moved into packages."""

from __future__ import annotations

import shutil
from pathlib import Path

from pyspark.sql import SparkSession

from tests.component.spark.stream.test_stream_queries import A0, A1, B0, Batches, run_available, stream
from tests.support.spark.fake_topics import FakeTopics

CHECKPOINT = Path(__file__).resolve().parents[3] / "fixtures/raymq-before-wings/stream-checkpoint"


def test_a_query_continues_from_a_checkpoint_of_an_earlier_version(spark: SparkSession, tmp_path: Path) -> None:
    """A streaming query continues from a checkpoint that an older raymq has written. The checkpoint covers batches 0 to
    2, which contain all messages that exist when the query starts. So the query reads only messages that are added
    later."""
    shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")
    topics, batches = FakeTopics({A0: (3, 250), A1: (0, 40), B0: (0, 0)}), Batches()
    before = topics.messages
    run_available(stream(spark, topics, max_offsets=100), batches, tmp_path / "checkpoint")
    assert batches.rows == {}
    topics.append(A0, 7)
    topics.append(B0, 30)
    run_available(stream(spark, topics, max_offsets=100), batches, tmp_path / "checkpoint")
    assert sorted(batches.rows) == [3]
    assert sorted(batches.all_rows) == sorted(topics.messages - before)
