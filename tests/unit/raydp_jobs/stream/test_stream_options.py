"""Tests that the options of `stream_topic` have the same names as the equivalent options of Spark's Kafka
source."""

from __future__ import annotations

import inspect
import re

import pytest

from raydp_jobs.stream.planner import BatchLimits
from raydp_jobs.stream.topic_stream import StartingOptions, stream_topic
from raymq.common.errors import InvalidArgumentError

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

KAFKA_OPTIONS = (
    "startingOffsets startingTimestamp startingOffsetsByTimestamp startingOffsetsByTimestampStrategy failOnDataLoss "
    "minPartitions maxOffsetsPerTrigger minOffsetsPerTrigger"
).split()
"""Names of the streaming options of Spark 3.5's Kafka source that `stream_topic` also has."""
OTHER_NAMES = {
    "topic": "subscribe",
    "topic_pattern": "subscribePattern",
    "max_trigger_delay_s": "maxTriggerDelay",
    "columns": None,
    "tags": None,
    "expression": None,
    "unreadable": None,
    "commit_group": None,
    "client": None,
}
"""Options of `stream_topic`, each with its other name in Spark's Kafka source, or None if the Kafka source has no such
option."""


def test_option_names_match_sparks_kafka_source() -> None:
    snake = {re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), name) for name in KAFKA_OPTIONS}
    names = inspect.signature(stream_topic).parameters.keys() - {"spark", "starting"}
    assert snake | OTHER_NAMES.keys() == names | StartingOptions.__annotations__.keys()


@pytest.mark.parametrize("option", ["max_offsets", "min_offsets", "min_partitions"])
@pytest.mark.parametrize("value", [0, -1, True, "5"])
def test_numbers_below_one_are_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=option):
        BatchLimits(**{option: value})  # type: ignore[arg-type]  # what users pass
