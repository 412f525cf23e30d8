"""Tests of every number that a program or a command can pass to raymq. A table in this module has the limits of each
number, or a reason why the number needs none.

A search by `inspect` finds the numeric arguments of all public functions, constructors and methods, and all numeric
settings and options. A number without a row in the table fails the test. The tests then pass absurd values to each
public call.
"""

from __future__ import annotations

import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from pydantic import BaseModel, ValidationError

import raydp_jobs
import raymq
import raymq.data
import raymq.serve
from raydp_jobs.stream.topic_stream import StartingOptions
from raymq.client.consumer.pull import settings as pull_settings
from raymq.client.consumer.pull.settings import PullOptions
from raymq.client.consumer.pull_once import PULL_MAX_MESSAGES, PULL_MAX_WAIT_S
from raymq.client.consumer.push import settings as push_settings
from raymq.client.consumer.push.consumer import PushOptions
from raymq.client.consumer.simple.settings import SimpleOptions, SimpleSettings
from raymq.client.producer import settings as producer_settings
from raymq.client.producer.queue_selector import DestinationOptions
from raymq.client.producer.settings import ProducerOptions
from raymq.client.scan.offsets import ending_boundary, starting_boundary
from raymq.client.scan.ranges import ScanOptions, check_options
from raymq.common.closing import OfProcess
from raymq.common.config.cluster import SETTINGS_SECTIONS, ClusterSettings
from raymq.common.config.live import LiveOptions, check_change, is_live
from raymq.common.errors import ConfigError, InvalidArgumentError, MessageIllegalError
from raymq.common.message import Message
from raymq.common.numbers import LONGEST_TIME_S, NUMBER_MAX, NumberRange, number_checks
from raymq.common.protocol.group import (
    RETRY_INTERVAL_S,
    RETRY_MULTIPLIER,
    GroupChanges,
    GroupConfig,
    StartOffsetQuery,
    check_group_config,
)
from raymq.data.offsets import resolve_ranges
from raymq.records.format.compression import Compression, CompressionType
from raymq.remoting.access.users import QUOTA, Bounds, check_bounds
from tests.support.clients.scan_source import Queues
from tests.unit.raymq.test_forks import kinds

_NUMERIC = re.compile(r"\b(int|float)\b")

NOT_NUMBERS = ["3", b"1", True, False, math.nan, math.inf, -math.inf, 2**63, 2**200, 10**5000, 1j, [1], object()]
"""Values that no numeric argument accepts, whatever its limits are."""


class PublicNumber(NamedTuple):
    """One numeric argument of a public call: the call's name, the argument's name, and the argument's
    annotation."""

    call: str
    argument: str
    annotation: str


# The code that finds every numeric argument of raymq's public calls

OPTIONS = {
    options.__name__: options
    for options in (
        *(ProducerOptions, PullOptions, SimpleOptions, PushOptions, DestinationOptions),
        *(Bounds, GroupChanges, ScanOptions, StartingOptions),
    )
}
"""TypedDicts that declare keyword arguments of public calls, by name. If a call uses another TypedDict, the search for
numeric arguments raises KeyError."""


def public_objects() -> dict[str, Any]:
    """Return all objects that the public packages export, and the classes of objects that a program gets from a Client.
    The keys are the names."""
    found: dict[str, Any] = {}
    for module in (raymq, raymq.data, raymq.serve, raydp_jobs):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return {**found, **{kind.__name__: kind for kind in kinds() if kind not in found.values()}}


def calls_of(name: str, item: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the functions that a program can call on a public object: the function itself, or a class's constructor and
    public methods."""
    if not inspect.isclass(item):
        if callable(item):
            yield name, item
        return
    for member_name, member in inspect.getmembers(item, callable):
        is_own = str(getattr(member, "__module__", "")).startswith(("raymq", "raydp_jobs"))
        if is_own and (not member_name.startswith("_") or member_name in ("__init__", "__call__")):
            yield f"{name}.{member_name}", member


def numbers_of(call: str, function: Callable[..., Any]) -> Iterator[PublicNumber]:
    """Yield the numeric arguments of a call. Each keyword that a TypedDict declares counts as one argument."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    for parameter in parameters:
        annotation = str(parameter.annotation)
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", annotation)
        if unpacked is not None:
            options = OPTIONS[unpacked[1]]
            for name, kind in options.__annotations__.items():
                text = kind.__forward_arg__ if isinstance(kind, typing.ForwardRef) else str(kind)
                if is_number(text, vars(inspect.getmodule(options))):
                    yield PublicNumber(unpacked[1], name, text)
        elif is_number(annotation, getattr(inspect.unwrap(function), "__globals__", {})):
            yield PublicNumber(call, parameter.name, annotation)


def is_number(annotation: str, names: Mapping[str, Any]) -> bool:
    """Return True if values with this annotation are numbers, or contain numbers. `names` resolves type
    aliases."""

    def written_out(word: re.Match[str]) -> str:
        alias = names.get(word[0])
        return word[0] if alias is None or inspect.isclass(alias) else str(alias)

    text = re.sub(r"\b[A-Z]\w+", written_out, annotation)
    return _NUMERIC.search(text) is not None and "Callable[" not in text


def fields_of(name: str, item: Any) -> Iterator[PublicNumber]:
    """Yield the numeric fields of a public value class (msgspec or pydantic) whose constructor has no explicit
    signature."""
    if inspect.isclass(item) and issubclass(item, msgspec.Struct):
        for field_name, kind in item.__annotations__.items():
            if _NUMERIC.search(str(kind)):
                yield PublicNumber(f"{name}.__init__", field_name, str(kind))
    elif inspect.isclass(item) and issubclass(item, BaseModel):
        for field_name, field in item.model_fields.items():
            if _NUMERIC.search(str(field.annotation)):
                yield PublicNumber(f"{name}.__init__", field_name, str(field.annotation))


def doors() -> list[PublicNumber]:
    """Return every number that a program can pass to a public call."""
    found: dict[PublicNumber, None] = {}
    for name, item in PUBLIC.items():
        found |= dict.fromkeys(fields_of(name, item))
        for call, function in calls_of(name, item):
            found |= dict.fromkeys(numbers_of(call, function))
    return list(found)


PUBLIC = public_objects()
OBJECTS = {kind.__name__: kind for kind in kinds()}
DOORS = doors()


# Allowed ranges of the number arguments of public methods

IMMUNITY_S = NumberRange(1, int(LONGEST_TIME_S))
NOT_NEGATIVE, POSITIVE = NumberRange(0, NUMBER_MAX), NumberRange(1, NUMBER_MAX)
TIME_S, MOMENT_MS = NumberRange(0.0, LONGEST_TIME_S), NumberRange(978_307_200_000, NUMBER_MAX, otherwise=0)
SIGNED = NumberRange()
LIMITED_S = NumberRange(0.001, LONGEST_TIME_S)
RESERVED_S = NumberRange(60.0, 315_360_000.0, otherwise=0)
RATE = NumberRange(0.001, 1e9)
AMOUNT = NumberRange(0.0, NUMBER_MAX)
TASK_MS = NumberRange(1, int(LONGEST_TIME_S) * 1000)
EXECUTORS = NumberRange(1, 100_000)

IN_QUEUE_TESTS = "the method checks it; tested in test_queue.py"
TABLE: Mapping[tuple[str, str], NumberRange | str] = {
    **{("ProducerOptions", name): bounds for name, bounds in producer_settings.RANGES.items()},
    **{("raymq.ProducerSettings.__init__", name): bounds for name, bounds in producer_settings.RANGES.items()},
    **{("PullOptions", name): bounds for name, bounds in pull_settings.RANGES.items()},
    **{("PushOptions", name): bounds for name, bounds in push_settings.RANGES.items()},
    **{(options, "consume_timestamp_ms"): MOMENT_MS for options in ("PullOptions", "SimpleOptions")},
    **{("Bounds", name): QUOTA for name in Bounds.__annotations__},
    ("GroupChanges", "retry_queue_nums"): NumberRange(1, 1024),
    ("GroupChanges", "retry_max_times"): NumberRange(0, 1000),
    ("GroupChanges", "retry_intervals_s"): "a tuple of times; tests/unit/actors/core/broker/test_state.py",
    ("ScanOptions", "max_offsets"): POSITIVE,
    ("ScanOptions", "starting_timestamp"): NumberRange(0, 2**63 - 1),
    ("ScanOptions", "ending_timestamp"): NumberRange(0, 2**63 - 1),
    ("StartingOptions", "starting_timestamp"): NumberRange(0, 2**63 - 1),
    ("DestinationOptions", "sharding_key"): "every text and every number of 64 bits is a key; tested below",
    # Limits of the numeric arguments of calls that make or use producers
    ("Client.write_queues", "timeout_s"): TIME_S,
    ("Client.push_consumer", "consume_timestamp_ms"): MOMENT_MS,
    ("Client.repeatable_writer", "epoch"): NOT_NEGATIVE,
    ("Client.repeatable_writer", "first_queue"): NumberRange(0, 2**31 - 1),
    ("Client.repeatable_writer", "now_ms"): MOMENT_MS,
    ("Client.transaction_producer", "check_threads"): NumberRange(1, 1000),
    ("TransactionProducer.send_in_transaction", "check_immunity_s"): IMMUNITY_S,
    ("TransactionProducer.transaction", "check_immunity_s"): IMMUNITY_S,
    ("TransactionProducer.send_in_transaction", "sharding_key"): "as of DestinationOptions",
    ("TransactionProducer.transaction", "sharding_key"): "as of DestinationOptions",
    ("raymq.select_queue_by_hash", "argument"): "as a sharding key",
    ("raymq.Compression.__init__", "threshold_bytes"): NOT_NEGATIVE,
    ("raymq.Compression.__init__", "level"): NumberRange(1, 22),
    ("raymq.Message.__init__", "flag"): NumberRange(-(2**31), 2**31 - 1),
    ("raymq.Message.__init__", "delay_level"): NumberRange(0, 18),
    ("raymq.Message.__init__", "priority"): NumberRange(0, 9),
    ("raymq.Message.__init__", "deliver_at_ms"): "the greatest depends on the time of the call; tested below",
    ("raymq.MessageQueue.__init__", "queue_id"): "each door refuses a queue that its topic does not have; tested below",
    # Limits of the numeric arguments of consumer calls
    **{
        (f"{kind}.{method}", name): bounds
        for kind in ("PullConsumer", "AsyncPullConsumer")
        for method, name, bounds in (
            ("poll", "max_messages", POSITIVE),
            ("poll_table", "max_messages", POSITIVE),
            ("seek", "offset", SIGNED),  # an offset outside of the queue's bounds raises OffsetOutOfRangeError
            # A commit of an offset that no poll has reached raises OffsetOutOfRangeError.
            ("commit", "offsets", SIGNED),
            ("offset_for_timestamp", "timestamp_ms", MOMENT_MS),
            ("offsets_for_times", "times_ms", MOMENT_MS),
            ("send_back", "delay_level", NumberRange(-1, 18)),
            ("send_back", "max_reconsume_times", NumberRange(0, 2**31 - 1, otherwise=-1)),
        )
    },
    **{
        (f"{kind}.{method}", name): bounds
        for kind in ("SimpleConsumer", "AsyncSimpleConsumer")
        for method, name, bounds in (
            ("receive", "max_messages", NumberRange(1, 4096)),
            ("receive", "invisible_s", NumberRange(0.1, 43_200.0)),
            ("change_invisible", "invisible_s", NumberRange(0.0, 43_200.0)),
            ("change_invisible_handles", "invisible_s", NumberRange(0.0, 43_200.0)),
            ("extend_invisible", "invisible_s", NumberRange(0.0, 43_200.0)),
            ("extend_invisible_handles", "invisible_s", NumberRange(0.0, 43_200.0)),
        )
    },
    ("PushConsumer.on_messages", "batch_max"): NumberRange(1, 1024),
    ("PushConsumer.start", "instances"): NumberRange(1, 256),
    ("PushConsumer.start", "num_cpus"): NumberRange(0.0, 1e6),
    ("raymq.ConsumeLater.__init__", "delay_level"): NumberRange(-1, 18),
    ("raymq.ConsumeLater.__init__", "suspend_ms"): NumberRange(-1, 2**31 - 1),
    ("raymq.ConsumeLater.__init__", "first"): NOT_NEGATIVE,
    ("raymq.predicate", "timeout_s"): NumberRange(0.1, 300.0),
    # No limits here: `refuse` itself compares the index with the batch's size. Its InvalidArgumentError has another
    # text than the error of the general check of numbers, which accepts every negative index.
    ("raymq.PutBatch.refuse", "index"): SIGNED,
    # The limits of numbers that programs pass to the administration's calls
    ("raymq.GroupConfig.__init__", "retry_queue_nums"): "Admin.create_group checks it, as it checks GroupChanges",
    ("raymq.GroupConfig.__init__", "retry_max_times"): "Admin.create_group checks it, as it checks GroupChanges",
    ("raymq.exponential_intervals", "first_s"): RETRY_INTERVAL_S,
    ("raymq.exponential_intervals", "longest_s"): RETRY_INTERVAL_S,
    ("raymq.exponential_intervals", "multiplier"): RETRY_MULTIPLIER,
    ("raymq.serve.RaymqAdapterConfig.__init__", "retry_intervals_s"): "a tuple; tests/unit/raymq/serve/test_config.py",
    ("raymq.GroupConfig.__init__", "retry_intervals_s"): "Admin.create_group checks it, as it checks GroupChanges",
    ("raymq.connect", "broker_groups"): NumberRange(1, 26),
    ("Admin.change_min_in_sync_replicas", "least"): NumberRange(1, 9),
    ("Admin.change_replicas", "count"): NumberRange(1, 9),
    ("Admin.change_replicas", "replace"): NOT_NEGATIVE,
    ("Admin.browse", "begin_ms"): MOMENT_MS,
    ("Admin.browse", "end_ms"): MOMENT_MS,
    ("Admin.browse", "begin_offset"): NOT_NEGATIVE,
    ("Admin.browse", "limit"): NumberRange(1, 1000),
    ("Admin.browse", "max_scanned"): NumberRange(1, 1_000_000),
    ("Admin.browse", "max_ms"): NumberRange(1, 60_000),
    # The allowed numbers of queues depend on the number of broker groups. Another test of this module checks them.
    ("Admin.create_topic", "queues"): SIGNED,
    ("Admin.create_topic", "reserve_time_s"): RESERVED_S,
    ("Admin.create_topic", "max_backlog"): NumberRange(1, 1 << 40, otherwise=0),
    ("Admin.create_topic", "max_backlog_bytes"): NumberRange(4096, 1 << 50, otherwise=0),
    # the limits of the number of queues depend on the number of broker groups
    ("Admin.create_topics", "topics"): SIGNED,
    # the allowed numbers of queues are not fixed: they depend on the number of broker groups
    ("Admin.update_topic", "queues"): SIGNED,
    # `perm` has no range here: if a number stands for no permission, NoPermissionError is raised, as in RocketMQ.
    ("Admin.update_topic", "perm"): SIGNED,
    ("Admin.update_topic", "reserve_time_s"): RESERVED_S,
    ("Admin.update_topic", "max_backlog"): NumberRange(1, 1 << 40, otherwise=0),
    ("Admin.update_topic", "max_backlog_bytes"): NumberRange(4096, 1 << 50, otherwise=0),
    ("Admin.delayed", "begin_ms"): MOMENT_MS,
    ("Admin.delayed", "end_ms"): MOMENT_MS,
    ("Admin.delayed", "limit"): NumberRange(1, 1000),
    ("Admin.offset_by_time", "timestamp_ms"): MOMENT_MS,
    ("Admin.pull", "offset"): SIGNED,  # an offset outside of the queue's bounds raises OffsetOutOfRangeError
    ("Admin.pull", "max_messages"): NumberRange(1, PULL_MAX_MESSAGES),
    ("Admin.pull", "wait_s"): NumberRange(0.0, PULL_MAX_WAIT_S),
    ("Admin.query_by_key", "max_messages"): POSITIVE,
    ("Admin.query_by_key", "begin_ms"): MOMENT_MS,
    ("Admin.query_by_key", "end_ms"): MOMENT_MS,
    ("Admin.replay", "begin_ms"): MOMENT_MS,
    ("Admin.replay", "end_ms"): MOMENT_MS,
    ("Admin.replay", "max_messages"): POSITIVE,
    ("Admin.replay", "rate"): RATE,
    ("Admin.reset_offsets", "timestamp_ms"): MOMENT_MS,
    # any 64-bit offset is allowed here: an offset outside of the queue's bounds raises OffsetOutOfRangeError instead
    ("Admin.reset_offsets", "offset"): SIGNED,
    ("Admin.tail", "positions"): NOT_NEGATIVE,
    ("Admin.tail", "max_messages"): NumberRange(1, 1024),
    ("Admin.set_config", "value"): "the setting's own bounds; tested below",
    ("DeadLetters.letters", "max_messages"): POSITIVE,
    ("DeadLetters.replay", "rate"): RATE,
    ("DeadLetters.replay", "max_messages"): NOT_NEGATIVE,
    # Limits of numbers for Ray's libraries, logging and Spark
    ("raymq.Queue.__init__", "name"): "a number is `maxsize`",
    ("raymq.Queue.__init__", "maxsize"): "create_topic has the bounds of `max_backlog`; tested in test_queue.py",
    ("raymq.Queue.get", "timeout"): IN_QUEUE_TESTS,
    ("raymq.Queue.get_async", "timeout"): IN_QUEUE_TESTS,
    ("raymq.Queue.get_nowait_batch", "num_items"): IN_QUEUE_TESTS,
    ("raymq.Queue.put", "timeout"): IN_QUEUE_TESTS,
    ("raymq.Queue.put_async", "timeout"): IN_QUEUE_TESTS,
    ("raymq.Queue.shutdown", "grace_period_s"): "it has no effect: ray.util.queue.Queue has it so",
    ("raymq.RaymqHandler.__init__", "level"): "logging has the bounds; tested below",
    ("raymq.RaymqHandler.__init__", "capacity"): POSITIVE,
    ("raymq.RaymqHandler.__init__", "flush_timeout_s"): TIME_S,
    ("raymq.data.TopicDatasource.__init__", "rows_per_block"): POSITIVE,
    ("raymq.data.TopicDatasource.__init__", "timeout_ms"): TASK_MS,
    ("raymq.data.TopicDatasource.get_read_tasks", "parallelism"): "Ray calls it",
    ("raymq.data.TopicDatasource.get_read_tasks", "per_task_row_limit"): "Ray calls it",
    **{
        (f"raymq.data.{call}", option): "an offset, a time, a word or a mapping; tested below"
        for call in ("read_topic", "TopicDatasource.__init__")
        for option in ("start_offset", "end_offset")
    },
    ("raymq.data.iter_topic", "interval_s"): TIME_S,
    ("raymq.data.iter_topic", "max_rows"): POSITIVE,
    ("raymq.data.iter_topic", "timeout_ms"): TASK_MS,
    ("raymq.data.read_topic", "rows_per_block"): POSITIVE,
    ("raymq.data.read_topic", "timeout_ms"): TASK_MS,
    ("raymq.data.read_topic", "num_cpus"): AMOUNT,
    ("raymq.data.read_topic", "num_gpus"): AMOUNT,
    ("raymq.data.read_topic", "memory"): AMOUNT,
    ("raymq.data.read_topic", "resources"): AMOUNT,
    ("raymq.data.read_topic", "override_num_blocks"): NumberRange(1, 1_000_000),
    ("raymq.data.read_topic", "max_calls"): NOT_NEGATIVE,
    ("raymq.data.write_topic", "concurrency"): POSITIVE,
    ("raymq.serve.RaymqAdapterConfig.__init__", "result_ttl_s"): LIMITED_S,
    ("raymq.serve.RaymqAdapterConfig.__init__", "queues"): NumberRange(1, 1024),
    ("raymq.serve.RaymqAdapterConfig.__init__", "poll_max"): POSITIVE,
    ("raymq.serve.RaymqAdapterConfig.__init__", "first_retry_level"): NumberRange(1, 18),
    ("raymq.serve.RaymqAdapterConfig.__init__", "replica_deaths_max"): POSITIVE,
    ("raymq.serve.RaymqLagPolicy.__init__", "poll_interval_s"): TIME_S,
    ("raymq.serve.RaymqTaskProcessorAdapter.initialize", "consumer_concurrency"): NumberRange(1, 10_000),
    ("raymq.serve.RaymqTaskProcessorAdapter.stop_consumer", "timeout"): TIME_S,
    ("TaskConnection.send", "deliver_at_ms"): "the adapter calls it, with what Message checks",
    ("TaskConnection.send", "priority"): "the adapter calls it, with what Message checks",
    ("raydp_jobs.read_topic", "min_partitions"): POSITIVE,
    ("raydp_jobs.read_topic", "partition_bytes"): POSITIVE,
    ("raydp_jobs.spark_session", "executors"): EXECUTORS,
    ("raydp_jobs.spark_session", "executor_cores"): EXECUTORS,
    ("raydp_jobs.spark_session", "start_timeout_s"): LIMITED_S,
    ("raydp_jobs.stream_topic", "max_offsets_per_trigger"): POSITIVE,
    ("raydp_jobs.stream_topic", "min_offsets_per_trigger"): POSITIVE,
    ("raydp_jobs.stream_topic", "max_trigger_delay_s"): TIME_S,
    ("raydp_jobs.stream_topic", "min_partitions"): POSITIVE,
}
"""For each number that a program can pass: its limits, or the reason why it needs no limits in this table."""

RESULTS = (raymq.MessageExt, raymq.FetchedBatch, raymq.HookedBatch, raymq.PutBatch, raymq.PullResult, raymq.QueueRange)
RESULTS += (raymq.SendResult, raymq.TableResult, raymq.ReceivedMessage, raymq.data.WriteSummary, raymq.Predicate)
"""Classes of values that raymq creates and programs receive. Programs have no reason to create these values."""


def row_of(door: PublicNumber) -> NumberRange | str | None:
    """Return the limits that the test's table states for a numeric argument of a public call. If the table has no row
    for the argument itself, the row for the wait times of all client objects is used, if it applies."""
    row = TABLE.get((door.call, door.argument)) or TABLE.get((door.call.removeprefix("raymq."), door.argument))
    if row is not None:
        return row
    owner, _, method = door.call.rpartition(".")
    kind = PUBLIC.get(owner)
    if not inspect.isclass(kind):
        return None
    if kind in RESULTS or (method == "__init__" and issubclass(kind, (Exception, OfProcess))):
        return "raymq makes it"
    if issubclass(kind, OfProcess) and door.argument in ("timeout_s", "wait_s"):
        return TIME_S
    return None


def test_every_number_of_a_public_call_has_a_row() -> None:
    missing = [door for door in DOORS if row_of(door) is None]
    assert not missing, f"add bounds, or a reason, to TABLE: {missing}"
    assert len(DOORS) > 150
    names = {(door.call.removeprefix("raymq."), door.argument) for door in DOORS}
    stale = [key for key in TABLE if (key[0].removeprefix("raymq."), key[1]) not in names]
    assert not [key for key in stale if key[1] != "consume_message_batch_max_size"], "TABLE names what does not exist"


# Tests that pass numbers to the public functions and methods of raymq


def of_object(door: PublicNumber, value: object) -> None:
    """Pass `value` to a method of a client object that is not initialised. The method must check the value before it
    uses the object."""
    name, _, method = door.call.removeprefix("raymq.").partition(".")
    kind = OBJECTS[name]
    result = getattr(kind.__new__(kind), method)(**required(getattr(kind, method), door), **{door.argument: value})
    if inspect.iscoroutine(result):
        result.send(None)


def of_function(door: PublicNumber, value: object) -> None:
    """Pass `value` to a public function or to a public class's constructor."""
    owner, _, name = door.call.rpartition(".")
    if name == "__init__":
        function: Any = PUBLIC[owner]
    elif owner in PUBLIC:
        kind = PUBLIC[owner]
        function = getattr(kind.__new__(kind), name)
    else:
        function = PUBLIC[door.call]
    function(**required(function, door), **{door.argument: value})


def required(function: Callable[..., Any], door: PublicNumber) -> dict[str, Any]:
    """Return placeholder values for the required arguments of a call, except the number under test. The call must
    refuse the number before it uses the placeholders."""
    numbers = {one.argument for one in DOORS if one.call == door.call}
    return {
        name: 1 if name in numbers else (lambda message: True) if door.call == "raymq.predicate" else None
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in ("self", door.argument)
    }


def _mode_of(options: Mapping[str, Any]) -> push_settings.ConsumeMode:
    """Return the consume mode in which push consumers take an option."""
    return "share" if {"invisible_s", "prefetch_messages", "prefetch_mib"} & set(options) else "queue"


MAKERS: Mapping[str, Callable[..., Any]] = {
    "ProducerOptions": raymq.ProducerSettings,
    "PullOptions": partial(pull_settings.PullSettings.of, "g"),
    "SimpleOptions": partial(SimpleSettings.of, "g"),
    "PushOptions": lambda **options: push_settings.PushSettings(
        "g", (), StartOffsetQuery(), consume_mode=_mode_of(options), **options
    ),
    "Bounds": lambda **bounds: check_bounds(bounds),
    "GroupChanges": lambda **changes: check_group_config(GroupConfig("g", **changes)),
    "ScanOptions": lambda **options: scan_options(options),
    "StartingOptions": lambda **options: scan_options(options),
    "raymq.Compression.__init__": partial(Compression, CompressionType.ZSTD),
    "raymq.Message.__init__": partial(Message, "orders", b"x"),
    "raymq.RaymqHandler.__init__": partial(raymq.RaymqHandler, "logs", client=object()),
}
"""By name: the function that checks the options of a TypedDict, or that makes a value of a class with several
fields."""


def scan_options(options: Mapping[str, Any]) -> None:
    """Check the options of a batch read, as a Spark read does before it calls the cluster."""
    check_options(options)
    starting_boundary(options, ["orders"])
    ending_boundary(options, ["orders"])


def call(door: PublicNumber, value: object) -> None:
    """Make the public call `door.call`, with `value` as the argument `door.argument`."""
    if door.call in MAKERS:
        MAKERS[door.call](**{door.argument: value})
    elif door.call.removeprefix("raymq.").partition(".")[0] in OBJECTS:
        of_object(door, value)
    else:
        of_function(door, value)


def absurd_values(bounds: NumberRange, annotation: str) -> list[object]:
    """Return values that raymq must refuse for a numeric argument with the range `bounds` and the type annotation
    `annotation`."""
    whole = "float" not in annotation
    values: list[object] = [*NOT_NUMBERS, *([0.5, np.float32(2.0)] if whole else [])]
    if bounds.high == 2**63 - 1 and not whole:
        # converted to a float, 2**63 equals this limit, so it is not refused
        values = [value for value in values if value != 2**63]
    beyond = [bounds.low - 1, bounds.high + 1] if whole else [bounds.low - 0.0001, bounds.high * 2 + 1]
    if "None" not in annotation:
        values.append(None)
    return values + [value for value in beyond if not bounds.has(value)]


BOUNDED = [(door, row) for door in DOORS if isinstance(row := row_of(door), NumberRange)]


@pytest.mark.parametrize(("door", "bounds"), BOUNDED, ids=[f"{door.call}-{door.argument}" for door, _ in BOUNDED])
def test_an_absurd_number_is_refused_before_anything_is_done(door: PublicNumber, bounds: NumberRange) -> None:
    error: type[Exception] = InvalidArgumentError
    if door.call == "raymq.Message.__init__":
        error = MessageIllegalError
    elif door.call.startswith("raymq.serve.RaymqAdapterConfig"):
        error = ValidationError
    for value in absurd_values(bounds, door.annotation):
        passed = {"key": value} if "Mapping[" in door.annotation or "dict[" in door.annotation else value
        with pytest.raises(error) as caught:
            call(door, passed)
        assert door.argument in str(caught.value), (value, caught.value)
        assert len(str(caught.value)) < 1000
        if error is InvalidArgumentError and "timestamp" not in door.argument:
            # An error about a value that is no number does not name the bounds of 64 bits.
            assert bounds == NumberRange() or str(bounds) in str(caught.value), (value, caught.value)


VALUES: Mapping[str, Mapping[str, Any]] = {
    "raymq.ProducerSettings.__init__": {},
    "raymq.ConsumeLater.__init__": {},
    "raymq.serve.RaymqAdapterConfig.__init__": {},
    "raymq.serve.RaymqLagPolicy.__init__": {"queue_name": "images"},
}
"""Constructors that check the numbers in their fields themselves, instead of by the decorator `checked`. For each
constructor: the other arguments that a test must pass."""


def function_of(door: PublicNumber) -> Callable[..., Any]:
    """Return the public function or method `door.call`, which has a numeric argument. Its decorator `checked` is not
    removed."""
    owner, _, name = door.call.rpartition(".")
    kind = PUBLIC.get(owner) or OBJECTS.get(owner)
    function: Callable[..., Any] = PUBLIC[door.call] if kind is None else getattr(kind, name)
    return function


@pytest.mark.parametrize(("door", "bounds"), BOUNDED, ids=[f"{door.call}-{door.argument}" for door, _ in BOUNDED])
def test_the_bounds_themselves_are_taken(door: PublicNumber, bounds: NumberRange) -> None:
    for value in (bounds.low, bounds.high, bounds.low if bounds.otherwise is None else bounds.otherwise):
        passed = {"key": value} if "Mapping[" in door.annotation or "dict[" in door.annotation else value
        if door.call in MAKERS and door.call != "raymq.RaymqHandler.__init__":
            call(door, passed)
        elif door.call in VALUES:
            PUBLIC[door.call.rpartition(".")[0]](**{**VALUES[door.call], door.argument: passed})
        else:
            check, _ = number_checks(function_of(door))[door.argument]
            assert check(passed) == passed


@pytest.mark.parametrize(
    "value", [-1, True, math.nan, math.inf, 1.5, 2**63, 10**5000, None, b"1"], ids=lambda one: "value"
)
def test_an_absurd_offset_of_a_read_is_refused(value: Any) -> None:
    source = Queues({("broker-a", 0): (0, 9)})
    for absurd in (value, {"orders": {"broker-a:0": value}}):
        for options in ((absurd, "latest"), ("earliest", absurd)):
            with pytest.raises(InvalidArgumentError, match=r"(start|end)_offset must be") as caught:
                resolve_ranges(source, "orders", *options, lenient=False)
            assert len(str(caught.value)) < 400


# Tests of numeric settings


def numeric_settings() -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield the numeric settings of `raymq.yaml`: section, class of the section, and key."""
    for section, kind in {"": ClusterSettings, **SETTINGS_SECTIONS}.items():
        for key, field in kind.model_fields.items():
            if _NUMERIC.search(str(field.annotation)):
                yield section, kind, key


SETTINGS = list(numeric_settings())


@pytest.mark.parametrize(("section", "kind", "key"), SETTINGS, ids=[f"{one[0]}.{one[2]}" for one in SETTINGS])
def test_a_setting_takes_no_absurd_number(section: str, kind: type[BaseModel], key: str) -> None:
    field = kind.model_fields[key]
    names = {name for one in field.metadata for name in ("ge", "gt", "le", "lt") if hasattr(one, name)}
    assert names & {"ge", "gt"}, "give this setting a least value"
    assert names & {"le", "lt"}, "give this setting a greatest value"
    allowed = [] if "None" not in str(field.annotation) else [None]
    for value in (True, False, math.nan, math.inf, -math.inf, 2**63, 2**200, -1e30, "x", [1], None):
        if value in allowed:
            continue
        with pytest.raises(ValidationError, match=key):
            kind(**{key: value})
    if section and is_live(f"{section}.{key}"):
        for value in (True, math.nan, 2**200, -1e30, 10**5000):
            with pytest.raises(ConfigError, match=key):
                check_change(LiveOptions(), {}, f"{section}.{key}", value)
