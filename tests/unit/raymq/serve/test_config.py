"""Tests of the configuration of a task queue: its topics, its consumer group, and values that are refused."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from raymq.common.errors import ConfigError, IllegalNameError
from raymq.serve import RaymqAdapterConfig
from raymq.serve.config import TaskSettings


def settings(adapter_config: Any = None, **fields: Any) -> TaskSettings:
    defaults = {"queue_name": "jobs", "max_retries": 3, "failed_task_queue_name": None}
    config = SimpleNamespace(
        **defaults | {"unprocessable_task_queue_name": None, "adapter_config": adapter_config} | fields
    )
    return TaskSettings.of(config)


def test_names_follow_from_the_queues():
    made = settings()
    assert (made.queue, made.group, made.results, made.topics) == (
        "jobs",
        "serve-jobs",
        "jobs-results",
        ["jobs", "jobs-results"],
    )


def test_names_may_be_given():
    made = settings(
        {"group": "workers", "result_topic": "outcomes"},
        failed_task_queue_name="aside",
        unprocessable_task_queue_name="aside",
    )
    assert (made.group, made.topics) == ("workers", ["jobs", "outcomes", "aside"])


@pytest.mark.parametrize(
    "fields",
    [
        {"queues": 0},
        {"poll_max": 0},
        {"result_ttl_s": 0},
        {"first_retry_level": 19},
        {"retry_intervals_s": (0,)},
        {"consume_mode": "pop"},
        {"priorities": 1},
        {"broker_url": "redis://"},
    ],
)
def test_options_have_bounds_and_no_others(fields):
    with pytest.raises(ValidationError):
        RaymqAdapterConfig(**fields)
    with pytest.raises(ConfigError, match=next(iter(fields))):
        settings(fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_retries": -1}, "0 or more"),
        ({"failed_task_queue_name": "jobs"}, "dead queues must differ"),
        ({"unprocessable_task_queue_name": "jobs-results"}, "dead queues must differ"),
        ({"adapter_config": RaymqAdapterConfig(result_topic="jobs")}, "dead queues must differ"),
        ({"adapter_config": "redis://"}, "RaymqAdapterConfig, not a str"),
        ({"adapter_config": RaymqAdapterConfig(priorities=True)}, 'priorities=True needs consume_mode="share"'),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(fields, reason):
    with pytest.raises(ConfigError, match=reason):
        settings(**fields)


@pytest.mark.parametrize("name", ["no spaces", "rmq_sys_mine", ""])
def test_queue_names_must_be_legal_topic_names(name):
    with pytest.raises(IllegalNameError):
        settings(queue_name=name)


def test_the_config_goes_along_with_a_deployment():
    config = RaymqAdapterConfig(queues=3)
    assert pickle.loads(pickle.dumps(config)) == config
