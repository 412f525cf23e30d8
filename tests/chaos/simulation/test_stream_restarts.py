"""Test of a streaming query whose driver is killed many times: the query continues from its checkpoint, and its sink
has every message exactly once.

Spark and the kills are real; the topics' messages are computed. RAYMQ_SOAK=1 kills the driver ten times, otherwise the
test kills the driver twice. RAYMQ_CHAOS_SEED repeats the moments of a run's kills.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.cases import chaos_seed, rounds
from tests.support.spark.batch_files import PLACE, BatchFiles
from tests.support.spark.killed_driver import Driver, kill_again_and_again
from tests.support.spark.numbers_program import LATER, GrowingTopics

KILLS = rounds(2, 10)
PROGRAM = "tests.support.spark.numbers_program"


@pytest.mark.timeout(600)  # The timeout is long, because the test starts three JVMs, or eleven with RAYMQ_SOAK.
def test_no_row_is_missing_or_doubled_after_kills_of_the_driver(tmp_path: Path) -> None:
    seed = chaos_seed()
    sink = BatchFiles(tmp_path / "sink", PLACE)
    (tmp_path / "began").write_text(str(time.time()))
    kill_again_and_again(lambda: Driver(PROGRAM, tmp_path, str(tmp_path)), sink, random.Random(seed), KILLS)
    (tmp_path / "ended").write_text(str(time.time()))
    Driver(PROGRAM, tmp_path, str(tmp_path), "end").finish()
    expected = {row[1:] for row in GrowingTopics(tmp_path).messages}
    counts = Counter(sink.rows())
    print(f"{len(expected)} messages in {sink.count('json')} batches, {sink.count('begun')} begun")
    assert any(row[:2] == (LATER.broker_name, LATER.queue_id) for row in expected)
    assert (len(expected - counts.keys()), len(counts.keys() - expected)) == (0, 0)
    assert {row: count for row, count in counts.items() if count > 1} == {}
    assert sink.count("different") == 0
