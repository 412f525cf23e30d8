"""Every number that a program passes is checked before anything is done with it, in every public call."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

import raymq
from raymq.client.consumer.pull.settings import BOUNDS, PullSettings
from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.simple.settings import SimpleSettings
from raymq.client.producer.settings import ProducerSettings
from raymq.common.closing import OfProcess
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import Message
from raymq.common.names import LONGEST_TIME_S, NUMBER_MAX, real_number, seconds, whole_number
from raymq.common.protocol.group import StartOffsetQuery
from raymq.serve import RaymqAdapterConfig, RaymqLagPolicy, RaymqTaskProcessorAdapter
from tests.support.clients.fakes import FakeStore
from tests.support.clients.producers import producers_of_fakes
from tests.unit.raymq.test_forks import kinds

NEVER = ["3", True, False, math.nan, math.inf, -math.inf, 2**64, -(2**64), b"1", [1], 1j, np.float64("nan"), object()]
"""Values that no argument takes."""
FRACTIONS = [0.5, 1.0, np.float32(2.0)]
"""Values that no whole number takes."""


def arguments() -> list[tuple[type[OfProcess], str, str, str]]:
    """Every argument of a public call that is a number: the class, the method, the argument, and its annotation."""
    found = []
    for kind in kinds():
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            for parameter in inspect.signature(member).parameters.values():
                annotation = str(parameter.annotation).removesuffix(" | None")
                if not name.startswith("_") and annotation in ("int", "float"):
                    found.append((kind, name, parameter.name, annotation))
    return found


ARGUMENTS = arguments()


def refused(kind: type[OfProcess], method: str, argument: str, value: object) -> str:
    """The text of the InvalidArgumentError. The object was not initialised: the check must come first."""
    item = kind.__new__(kind)
    required = [
        name
        for name, parameter in inspect.signature(getattr(kind, method)).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in ("self", argument)
    ]
    numbers = {one[2] for one in ARGUMENTS if one[:2] == (kind, method)}
    others = {name: 1 if name in numbers else None for name in required}

    def call() -> None:
        result = getattr(item, method)(**{**others, argument: value})
        if inspect.iscoroutine(result):
            result.send(None)

    with pytest.raises(InvalidArgumentError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(("kind", "method", "argument", "annotation"), ARGUMENTS)
def test_no_public_call_takes_what_is_no_number(
    kind: type[OfProcess], method: str, argument: str, annotation: str
) -> None:
    for value in [*NEVER, *(FRACTIONS if annotation == "int" else ())]:
        assert argument in refused(kind, method, argument, value)
    if annotation == "float" and argument.endswith("_s"):
        for value in (-1, -0.001, LONGEST_TIME_S * 2):
            assert argument in refused(kind, method, argument, value)


def test_there_are_many_such_arguments() -> None:
    assert len(ARGUMENTS) > 60


@pytest.mark.parametrize("value", NEVER)
def test_no_setting_takes_what_is_no_number(value: object) -> None:
    counts = ("max_buffered_bytes", "max_buffered_messages", "max_message_size_bytes", "default_topic_queue_nums")
    for name in ("send_timeout_s", "attempt_timeout_s", *counts):
        with pytest.raises(InvalidArgumentError, match=name):
            ProducerSettings(**{name: value})  # type: ignore[arg-type]
    for name in BOUNDS:
        with pytest.raises(InvalidArgumentError, match=name):
            PullSettings.of("g", **{name: value})  # type: ignore[misc]
    for name in ("threads", "pull_batch_size", "pull_interval_ms", "consume_timeout_s", "max_reconsume_times"):
        with pytest.raises(InvalidArgumentError, match=name):
            PushSettings("g", (), StartOffsetQuery(), **{name: value})  # type: ignore[arg-type]
    for settings in (PullSettings, SimpleSettings):
        with pytest.raises(InvalidArgumentError, match="consume_timestamp_ms"):
            settings.of("g", consume_timestamp_ms=value)  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", NEVER)
def test_serve_and_connect_take_nothing_that_is_no_number(value: Any) -> None:
    adapter = RaymqTaskProcessorAdapter.__new__(RaymqTaskProcessorAdapter)  # the check comes first
    with pytest.raises(InvalidArgumentError, match="consumer_concurrency"):
        adapter.initialize(value)
    with pytest.raises(InvalidArgumentError, match="delay_s"):
        adapter.enqueue_task_sync("resize", delay_s=value)
    with pytest.raises(InvalidArgumentError, match="poll_interval_s"):
        RaymqLagPolicy("images", poll_interval_s=value)
    with pytest.raises(InvalidArgumentError, match="broker_groups"):
        raymq.connect(embedded=True, broker_groups=value)
    for name, field in RaymqAdapterConfig.model_fields.items():
        if "int" in str(field.annotation) or "float" in str(field.annotation):
            with pytest.raises(ValidationError, match=name):
                RaymqAdapterConfig(**{name: value})


def test_numbers_of_numpy_become_plain_numbers() -> None:
    assert [type(whole_number("n", np.int64(3))), type(whole_number("n", np.uint8(3)))] == [int, int]
    assert type(real_number("n", np.float32(0.5))) is float
    assert type(seconds("n", np.int32(5))) is float
    assert type(PullSettings.of("g", threshold_count=np.int64(5)).threshold_count) is int
    assert type(ProducerSettings(max_buffered_messages=np.int64(5)).max_buffered_messages) is int
    assert type(PushSettings("g", (), StartOffsetQuery(), threads=np.int64(2)).threads) is int


def test_bounds_are_included() -> None:
    assert whole_number("n", NUMBER_MAX) == NUMBER_MAX
    assert whole_number("n", -NUMBER_MAX) == -NUMBER_MAX
    assert seconds("n", 0) == 0
    assert seconds("n", LONGEST_TIME_S) == LONGEST_TIME_S


@pytest.mark.parametrize("value", ["3", math.nan, -1, True, math.inf])
def test_a_send_with_an_absurd_timeout_leaves_its_queue_free(value: Any) -> None:
    store = FakeStore()
    with producers_of_fakes() as make:
        producer = make(store)
        producer.send(Message("orders", b"one"))
        producer.send(Message("orders", b"two"))
        with pytest.raises(InvalidArgumentError, match="timeout_s"):
            producer.send(Message("orders", b"three"), timeout_s=value)
        with pytest.raises(InvalidArgumentError, match="timeout_s"):
            producer.send_batch([Message("orders", b"three"), Message("orders", b"four")], timeout_s=value)
        producer.send(Message("orders", b"five"), timeout_s=np.float64(3))
        producer.send(Message("orders", b"six"), timeout_s=np.int32(3))
    assert store.everything() == [b"one", b"two", b"five", b"six"]
