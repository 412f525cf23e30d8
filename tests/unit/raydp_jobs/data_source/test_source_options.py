"""Tests of the options of Spark's `format("raymq")`: each option is converted, or refused by an error that names it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

import raymq
from raydp_jobs.data_source.options import (
    BATCH_OPTIONS,
    BATCH_WRITE_OPTIONS,
    STREAM_OPTIONS,
    STREAM_WRITE_OPTIONS,
    batch_options,
    batch_write_options,
    parse_options,
    producer_options,
    scan_options,
    stream_options,
    stream_write_options,
)
from raydp_jobs.sink.writer import topic_sink, write_topic
from raydp_jobs.source.reader import read_topic
from raydp_jobs.stream.topic_stream import StartingOptions, stream_topic
from raymq.client.producer.settings import ProducerOptions
from raymq.client.scan.ranges import ScanOptions, plan_ranges
from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.records.format.compression import Compression, CompressionType
from tests.support.clients.scan_source import T0_MS, Queues

# Ignore PySpark's deprecation warning about distutils.
pytestmark = pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")

READERS: dict[str, tuple[Callable[..., Any], Mapping[str, Any], type]] = {
    "batch": (read_topic, BATCH_OPTIONS, ScanOptions),
    "stream": (stream_topic, STREAM_OPTIONS, StartingOptions),
}


@pytest.mark.parametrize("reader", READERS)
def test_the_format_has_the_options_of_the_functions_and_no_others(reader: str) -> None:
    function, options, more = READERS[reader]
    names = {name for name, one in signature(function).parameters.items() if one.kind is Parameter.KEYWORD_ONLY}
    assert set(options) == (names | more.__annotations__.keys() | {"topic"}) - {"client"}


TEXTS: dict[str, tuple[str, Any]] = {
    "topic": ("orders, payments", ["orders", "payments"]),
    "topic_pattern": ("orders.*", "orders.*"),
    "columns": ("tags,queue_offset", ["tags", "queue_offset"]),
    "tags": ("paid || refunded", "paid || refunded"),
    "expression": ("price > 5", raymq.sql("price > 5")),
    "unreadable": ("raise", "raise"),
    "min_partitions": (" 12", 12),
    "partition_bytes": ("1048576", 1 << 20),
    "max_offsets": ("7", 7),
    "max_offsets_per_trigger": ("7", 7),
    "min_offsets_per_trigger": ("7", 7),
    "max_trigger_delay_s": ("2.5", 2.5),
    "fail_on_data_loss": ("False", False),
    "commit_group": ("progress", "progress"),
    "starting_offsets": ("earliest", "earliest"),
    "ending_offsets": ("latest", "latest"),
    "starting_timestamp": (str(T0_MS), T0_MS),
    "ending_timestamp": ("2026-03-01 12:00:00+00:00", datetime(2026, 3, 1, 12, tzinfo=UTC)),
    "starting_offsets_by_timestamp": (f'{{"a": {{"0": {T0_MS}}}}}', f'{{"a": {{"0": {T0_MS}}}}}'),
    "ending_offsets_by_timestamp": (f'{{"a": {{"0": {T0_MS}}}}}', f'{{"a": {{"0": {T0_MS}}}}}'),
    "starting_offsets_by_timestamp_strategy": ("latest", "latest"),
}


@pytest.mark.parametrize("option", sorted({*BATCH_OPTIONS, *STREAM_OPTIONS}))
def test_the_text_of_each_option_is_converted(option: str) -> None:
    text, value = TEXTS[option]
    topic = {} if option in ("topic", "topic_pattern") else {"topic": "orders"}
    for name in (option, option.upper()):
        assert parse_options({name: text, **topic})[option] == value
    other = topic or ({"topic": "orders"} if option == "topic_pattern" else {"topic_pattern": "orders.*"})
    assert option not in parse_options({option: None, **other})


def test_a_topic_that_is_named_twice_is_read_once() -> None:
    given = {"topic": "orders, orders", "starting_offsets": '{"a": {"0": 1}}'}
    for options in (batch_options(given), stream_options(given)):
        assert options["topic"] == ["orders"]


WRONG: list[tuple[str, str]] = [
    ("topic", "orders,,payments"),
    ("topic", "or ders"),
    ("columns", "tags,,body"),
    ("columns", "price"),
    ("tags", "||"),
    ("expression", "price >"),
    ("unreadable", "skip"),
    *((name, text) for name in ("min_partitions", "partition_bytes", "max_offsets") for text in ("0", "-1", "x", "")),
    *((name, "1.5") for name in ("max_offsets_per_trigger", "min_offsets_per_trigger")),
    *(("max_trigger_delay_s", text) for text in ("-1", "nan", "inf", "soon")),
    *(("fail_on_data_loss", text) for text in ("0", "yes", "")),
    ("commit_group", "a group"),
    ("starting_timestamp", "yesterday"),
    ("ending_timestamp", "1.5"),
]


@pytest.mark.parametrize(("option", "text"), WRONG)
def test_a_damaged_option_is_refused_when_the_table_is_loaded(option: str, text: str) -> None:
    with pytest.raises(RaymqError) as caught:
        parse_options({"topic": "orders", option: text})
    assert option in str(caught.value) or text in str(caught.value) or "skip" in text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"topic": "orders", "startingOffsets": "latest"}, "write starting_offsets"),
        ({"topic": "orders", "maxOffsetsPerTrigger": "3"}, "write max_offsets_per_trigger"),
        ({"topic": "orders", "kafka.bootstrap.servers": "x"}, "its options are"),
        ({"path": "orders"}, "without a path"),
        ({"topic": "orders", "client": "mq"}, "its options are"),
        ({}, "exactly one of the options topic and topic_pattern"),
        ({"topic": "orders", "topic_pattern": "o.*"}, "exactly one of the options topic and topic_pattern"),
    ],
)
def test_an_unknown_option_is_refused_with_the_right_one(given: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        parse_options(given)


@pytest.mark.parametrize("option", sorted(BATCH_OPTIONS.keys() ^ STREAM_OPTIONS.keys()))
def test_an_option_of_the_other_reader_is_refused_by_name(option: str) -> None:
    given = {"topic": "orders", option: TEXTS[option][0]}
    refuse, accept = (batch_options, stream_options) if option in STREAM_OPTIONS else (stream_options, batch_options)
    with pytest.raises(InvalidArgumentError, match=rf"no option {option}\b"):
        refuse(given)
    assert option in accept(given)


@pytest.mark.parametrize("convert", [batch_options, stream_options])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"starting_offsets": "{'a': 1}"}, "starting_offsets"),
        ({"starting_offsets": '{"a": {"0": -7}}'}, "starting_offsets"),
        ({"starting_timestamp": "1700000000"}, "starting_timestamp"),
        ({"starting_timestamp": str(T0_MS), "starting_offsets": '{"a": {"0": 7}}'}, "exclude each other"),
        ({"starting_offsets_by_timestamp_strategy": "skip"}, "starting_offsets_by_timestamp_strategy"),
    ],
)
def test_wrong_begins_are_refused_before_the_cluster_is_asked(
    convert: Callable[..., Any], given: dict[str, str], named: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        convert({"topic": "orders", **given})


def test_a_batch_cannot_begin_at_the_latest_offset_and_a_stream_can() -> None:
    given = {"topic": "orders", "starting_offsets": "latest"}
    with pytest.raises(InvalidArgumentError, match="starting_offsets"):
        batch_options(given)
    assert stream_options(given)["starting_offsets"] == "latest"


def test_the_options_of_the_format_plan_the_same_ranges_as_those_of_the_functions() -> None:
    queues = Queues({("broker-a", 0): (10, 100), ("broker-a", 1): (0, 30)})
    texts = {
        "topic": "orders",
        "starting_offsets": '{"broker-a": {"0": 20, "1": 5}}',
        "ending_timestamp": str(T0_MS + 50_000),
        "max_offsets": "31",
        "fail_on_data_loss": "true",
    }
    options = batch_options(texts)
    planned = plan_ranges(queues, options["topic"], **scan_options(options))
    assert planned == plan_ranges(
        queues,
        "orders",
        starting_offsets={"broker-a": {"0": 20, "1": 5}},
        ending_timestamp=T0_MS + 50_000,
        max_offsets=31,
        fail_on_data_loss=True,
    )
    assert sum(one.size for one in planned) == 31


WRITERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Mapping[str, Any]]] = {
    "batch": (write_topic, batch_write_options, BATCH_WRITE_OPTIONS),
    "stream": (topic_sink, stream_write_options, STREAM_WRITE_OPTIONS),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_each_option_of_the_writing_functions_is_obeyed_or_refused_with_a_reason(writer: str) -> None:
    function, convert, known = WRITERS[writer]
    names = {name for name, one in signature(function).parameters.items() if one.kind is Parameter.KEYWORD_ONLY}
    spark = {"checkpointlocation"} if writer == "stream" else set()
    obeyed = known.keys() - {"topic"} - spark
    for name in obeyed | names | ProducerOptions.__annotations__.keys():
        if name in obeyed:
            assert name in names | ProducerOptions.__annotations__.keys()
            assert name in WRITE_TEXTS
        else:
            with pytest.raises(InvalidArgumentError, match=rf"no option {name}: "):
                convert({"topic": "orders", name: "1"})


WRITE_TEXTS: dict[str, tuple[str, Any]] = {
    "topic": ("orders", "orders"),
    "sort": ("always", "always"),
    "write_id": ("load-7", "load-7"),
    "plan_location": ("file:///data/plans", Path("/data/plans")),
    "send_timeout_s": ("7.5", 7.5),
    "attempt_timeout_s": ("2", 2.0),
    "max_buffered_bytes": ("1000000", 1_000_000),
    "max_buffered_messages": ("1000", 1000),
    "max_message_size_bytes": ("1000", 1000),
    "compression": ("LZ4", Compression(CompressionType.LZ4)),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("option", WRITE_TEXTS)
def test_a_text_of_a_write_becomes_the_value_of_the_functions(writer: str, option: str) -> None:
    _, convert, known = WRITERS[writer]
    if option not in known:
        return
    text, value = WRITE_TEXTS[option]
    needed = {"write_id": "w"} if (writer, option) == ("batch", "plan_location") else {}
    options = convert({"topic": "orders", **needed, option.upper(): text})
    assert options[option] == value
    assert (option in producer_options(options)) == (option in ProducerOptions.__annotations__)
    if option != "topic":
        assert convert({"topic": "orders", option: None}) == convert({"topic": "orders"})


def test_the_checkpoint_of_a_query_is_an_option_of_spark() -> None:
    assert stream_write_options({"topic": "orders", "checkpointLocation": "/x"}) == {"topic": "orders", "sort": "auto"}


@pytest.mark.parametrize("convert", [batch_write_options, stream_write_options])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "choose the topic"),
        ({"topic": "orders,payments"}, "orders,payments"),
        ({"topic": "or ders"}, "or ders"),
        ({"sort": "maybe"}, "sort must be one of auto, always, never"),
        ({"plan_location": "plans"}, "absolute path"),
        ({"plan_location": "hdfs://name/plans"}, "absolute path"),
        ({"compression": "snappy"}, "none, lz4, zstd, zlib"),
        ({"send_timeout_s": "soon"}, "send_timeout_s must be a number of seconds"),
        ({"send_timeout_s": "0"}, "send_timeout_s"),
        ({"max_buffered_bytes": "0"}, "max_buffered_bytes"),
        ({"sendTimeoutS": "3"}, "write send_timeout_s"),
        ({"path": "orders"}, "call save() without a path"),
        ({"max_offsets": "3"}, "its options are"),
        ({"hooks": "x"}, "a text, not a function"),
    ],
)
def test_a_wrong_option_of_a_write_is_refused(convert: Callable[..., Any], given: dict[str, str], message: str) -> None:
    with pytest.raises(RaymqError, match=re.escape(message)):
        convert({"topic": "orders", **given} if given else {})


def test_a_plan_needs_the_name_of_its_write() -> None:
    with pytest.raises(InvalidArgumentError, match="pass write_id, too"):
        batch_write_options({"topic": "orders", "plan_location": "/data/plans"})
    with pytest.raises(InvalidArgumentError, match="write_id must be a text"):
        batch_write_options({"topic": "orders", "write_id": ""})
