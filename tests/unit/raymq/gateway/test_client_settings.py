"""Tests of the answers to clients' settings, and of the policies for retries by the client's language."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from raymq.common.delay import DELAY_LEVELS_MS
from raymq.common.protocol.group import GroupConfig
from raymq.gateway.convert.client_settings import (
    check_settings,
    consumer_settings,
    producer_settings,
    retry_policy,
)
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import millis
from raymq.gateway.wire.enums import Code, Language
from raymq.gateway.wire.messages import UA, Publishing, Resource, RetryPolicy, Settings, Subscription


@dataclass(frozen=True)
class Retries:
    """The times between a client's attempts, in ms."""

    times_ms: list[float]


def pythons(policy: RetryPolicy, attempts: int) -> Retries:
    """Python's push consumer: whole seconds, the last time is repeated."""
    times = [one.seconds for one in policy.customized_backoff.next]
    return Retries([1000 * times[min(attempt, len(times)) - 1] for attempt in range(1, attempts + 1)])


def nodes(policy: RetryPolicy, attempts: int) -> Retries:
    """Node's consumers: only the exponential policy, whose seconds count as milliseconds."""
    backoff = policy.exponential_backoff
    return Retries([min(backoff.initial.seconds * backoff.multiplier**n, backoff.max.seconds) for n in range(attempts)])


@pytest.mark.parametrize("language", [*Language, 99])
def test_each_client_but_nodes_gets_the_list_of_times(language: int) -> None:
    policy = retry_policy(language, 16, DELAY_LEVELS_MS)
    assert policy.max_attempts == 17
    if language == Language.NODE_JS:
        assert policy.WhichOneof("strategy") == "exponential_backoff"
        assert nodes(policy, 3) == Retries([1000, 2000, 4000])
        assert nodes(policy, 40).times_ms[-1] == DELAY_LEVELS_MS[-1]
    else:
        assert [millis(one) for one in policy.customized_backoff.next] == list(DELAY_LEVELS_MS)
        assert pythons(policy, 20).times_ms[:2] == [1000, 5000]
        assert pythons(policy, 20).times_ms[-1] == DELAY_LEVELS_MS[-1]


def test_no_time_is_shorter_than_a_second_for_clients_with_whole_seconds() -> None:
    assert pythons(retry_policy(Language.PYTHON, 3, [10, 2500]), 2) == Retries([1000, 2000])


def test_a_producers_settings_are_answered() -> None:
    settings = Settings(publishing=Publishing(topics=[Resource(name="orders")]), user_agent=UA(language=Language.JAVA))
    answer = producer_settings(settings, 5000)
    assert answer.publishing.max_body_size == 5000
    assert answer.publishing.validate_message_type
    assert (answer.publishing.topics, answer.user_agent) == (settings.publishing.topics, settings.user_agent)
    assert answer.backoff_policy.max_attempts == 3
    assert millis(answer.backoff_policy.exponential_backoff.initial) == 10
    assert answer.HasField("metric")
    assert not answer.metric.on
    assert settings.publishing.max_body_size == 0


def test_a_consumers_settings_are_answered() -> None:
    settings = Settings(subscription=Subscription(group=Resource(name="billing")))
    answer = consumer_settings(settings, GroupConfig("billing", retry_max_times=2), fifo=True)
    assert answer.subscription.fifo
    assert answer.subscription.group.name == "billing"
    assert (answer.subscription.receive_batch_size, millis(answer.subscription.long_polling_timeout)) == (32, 20_000)
    assert answer.backoff_policy.max_attempts == 3
    own = consumer_settings(settings, GroupConfig("billing", retry_intervals_s=(1.5, 7.0)), fifo=True)
    assert [millis(one) for one in own.backoff_policy.customized_backoff.next] == [1500, 7000]


def test_settings_of_a_newer_client_keep_their_unknown_fields() -> None:
    newer = b"\xfa\x3f\x05hello"
    settings = Settings.FromString(Settings(publishing=Publishing()).SerializeToString() + newer)
    assert newer in producer_settings(settings, 5000).SerializeToString()


@pytest.mark.parametrize(
    "properties",
    [
        {str(number): "a" for number in range(33)},
        {"1a": "a"},
        {"a b": "a"},
        {"a" * 65: "a"},
        {"a": "a" * 257},
        {f"name{number}": "ä" * 200 for number in range(12)},
    ],
    ids=range(6),
)
def test_illegal_properties_of_a_client_are_refused(properties: dict[str, str]) -> None:
    with pytest.raises(CallRefusedError) as caught:
        check_settings(Settings(publishing=Publishing(), client_properties=properties))
    assert caught.value.status == Code.INVALID_CLIENT_PROPERTIES


def test_settings_name_what_the_client_is() -> None:
    with pytest.raises(CallRefusedError, match="neither publishing nor subscription"):
        check_settings(Settings(client_properties={"a": "b"}))
    check_settings(Settings(subscription=Subscription(), client_properties={"a" * 64: "b" * 256, "Zone.1-x_": ""}))
