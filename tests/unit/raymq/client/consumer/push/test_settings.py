"""Tests of a push consumer's settings: each value outside of RocketMQ's limits raises an error that names the
setting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raymq.client.consumer.push.settings import PushSettings
from raymq.client.consumer.subscription import Subscription
from raymq.client.predicates.predicate import predicate
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageModel
from raymq.common.protocol.consume_result import ConsumeLater
from raymq.common.protocol.membership import AllocateStrategy, Allocation
from raymq.records.filters.sql import sql

SETTINGS = PushSettings("billing", (Subscription.parse("orders", "paid"),))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("threads", (1, 1000), (0, 1001, True, 1.5)),
        ("consume_message_batch_max_size", (1, 1024), (0, 1025)),
        ("pull_batch_size", (1, 1024), (0, 1025)),
        ("pull_interval_ms", (0, 65535), (-1, 65536)),
        ("pull_threshold_for_queue", (1, 65535), (0, 65536)),
        ("pull_threshold_for_topic", (-1, 1, 6_553_500), (0, -2, 6_553_501)),
        ("pull_threshold_size_for_queue_mib", (1, 1024), (0, 1025)),
        ("pull_threshold_size_for_topic_mib", (-1, 1, 102_400), (0, 102_401)),
        ("consume_concurrently_max_span", (1, 65535), (0, 65536)),
        ("consume_timeout_s", (0.1, 900, 86400.0), (0, "15", -1)),
        ("max_reconsume_times", (-1, 0, 16), (-2, 2**31)),
        ("suspend_current_queue_time_ms", (-1, 5, 10**6), ("1 s", 1.5)),
        ("message_model", (MessageModel.BROADCASTING,), ("BROADCASTING",)),
    ],
)
def test_each_setting_is_checked_and_the_error_names_it(name, good, bad):
    for value in good:
        assert getattr(replace(SETTINGS, **{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidArgumentError, match=rf"^{name} must be .*{value!r}"):
            replace(SETTINGS, **{name: value})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("invisible_s", (2, 30.5, 43_200.0), (1.9, 43_201, "30")),
        ("prefetch_messages", (1, 65_535), (0, 65_536)),
        ("prefetch_mib", (1, 1024), (0, 1025)),
        ("consume_mode", ("share",), ("pop", None, 1)),
    ],
)
def test_the_settings_of_the_mode_share_are_checked_too(name, good, bad):
    shared = replace(SETTINGS, consume_mode="share")
    assert (shared.is_shared, SETTINGS.is_shared) == (True, False)
    for value in good:
        assert getattr(replace(shared, **{name: value}), name) == value
    for value in bad:
        with pytest.raises(InvalidArgumentError, match=rf"^{name} must be .*{value!r}"):
            replace(shared, **{name: value})


@pytest.mark.parametrize(
    ("mode", "setting"),
    [
        ("share", {"message_model": MessageModel.BROADCASTING}),
        ("share", {"allocation": Allocation(AllocateStrategy.AVG_BY_CIRCLE)}),
        ("share", {"pull_batch_size": 32}),
        ("share", {"pull_interval_ms": 1}),
        ("share", {"pull_threshold_for_queue": 1}),
        ("share", {"pull_threshold_for_topic": 1}),
        ("share", {"pull_threshold_size_for_queue_mib": 1}),
        ("share", {"pull_threshold_size_for_topic_mib": 1}),
        ("share", {"consume_concurrently_max_span": 1}),
        ("share", {"max_reconsume_times": 1}),
        ("share", {"suspend_current_queue_time_ms": 10}),
        ("share", {"offsets_dir": "/tmp"}),
        ("share", {"instance_name": "mine"}),
        ("queue", {"invisible_s": 10.0}),
        ("queue", {"prefetch_messages": 10}),
        ("queue", {"prefetch_mib": 10}),
    ],
)
def test_a_setting_without_effect_in_the_mode_is_refused(mode, setting):
    [name] = setting
    with pytest.raises(InvalidArgumentError, match=rf"^{name} has no effect with consume_mode='{mode}'"):
        replace(SETTINGS, consume_mode=mode, **setting)


def test_the_mode_share_refuses_predicates():
    wanted = Subscription.parse("orders", predicate(bool))
    with pytest.raises(InvalidArgumentError, match="cannot filter topic 'orders' by a predicate"):
        replace(SETTINGS, consume_mode="share", subscriptions=(wanted,))


def test_requests_that_are_not_stored_need_clustering_and_a_subscription_by_tags():
    answers = replace(SETTINGS, request_threads=4)
    with pytest.raises(InvalidArgumentError, match="request_threads has no effect with BROADCASTING"):
        replace(answers, message_model=MessageModel.BROADCASTING)
    for wanted in (predicate(bool), sql("a > 1")):
        with pytest.raises(InvalidArgumentError, match="can filter topic 'orders' by tags only"):
            replace(answers, subscriptions=(Subscription.parse("orders", wanted),))
    with pytest.raises(InvalidArgumentError, match=r"^request_threads must be"):
        replace(SETTINGS, request_threads=1001)


def test_rocketmqs_default_group_is_refused():
    with pytest.raises(InvalidArgumentError, match="DEFAULT_CONSUMER"):
        PushSettings("DEFAULT_CONSUMER", ())


def test_in_clustering_the_retry_topic_is_read_too_with_every_tag():
    assert SETTINGS.topics == {"orders", "%RETRY%billing"}
    assert SETTINGS.subscription("orders").tags == {"paid"}
    assert SETTINGS.subscription("%RETRY%billing").tag_codes is None


def test_in_broadcasting_there_is_no_retry_topic():
    assert replace(SETTINGS, message_model=MessageModel.BROADCASTING).topics == {"orders"}


@pytest.mark.parametrize(("name", "value"), [("delay_level", -2), ("delay_level", 19), ("first", -1)])
def test_an_answer_out_of_bounds_is_refused(name, value):
    with pytest.raises(InvalidArgumentError):
        ConsumeLater(**{name: value})
