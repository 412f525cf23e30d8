"""Answers the settings that a client sends when it starts, and chooses the times of its retries.

A client does not start before the answer. Clients of different languages know different policies for retries, so the
policy depends on the client's language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from raymq.common.protocol.group import RETRY_INTERVALS_S, GroupConfig
from raymq.gateway.convert.statuses import CallRefusedError
from raymq.gateway.convert.times import duration
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, Language

RECEIVE_BATCH_SIZE: Final = 32
"""Maximum number of messages for which a push consumer asks at once, as in RocketMQ."""
LONG_POLLING_MS: Final = 20_000
"""Maximum time in ms for which a receive waits for a message."""
PRODUCER_ATTEMPTS: Final = 3

CLIENT_PROPERTIES_MAX: Final = 32
CLIENT_PROPERTIES_BYTES_MAX: Final = 4096
CLIENT_PROPERTY_VALUE_MAX: Final = 256
_PROPERTY_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_.-]{0,63}")
_PRODUCER_FIRST_MS: Final = 10
_PRODUCER_LONGEST_MS: Final = 1000
_NODE_FACTOR: Final = 1000
"""Node's client takes the seconds of a duration for milliseconds."""


def check_settings(settings: wire.Settings) -> None:
    """Raise CallRefusedError if a client's settings are neither a producer's nor a consumer's, or if its own properties
    are too large or have illegal names."""
    if settings.WhichOneof("pub_sub") is None:
        raise CallRefusedError(Code.BAD_REQUEST, "the settings have neither publishing nor subscription")
    properties = settings.client_properties
    if len(properties) > CLIENT_PROPERTIES_MAX:
        raise _illegal(f"at most {CLIENT_PROPERTIES_MAX} properties are allowed")
    for name, value in properties.items():
        if not _PROPERTY_NAME.fullmatch(name):
            raise _illegal("a name begins with a letter, and has up to 64 letters, digits and the characters _ . -")
        if len(value) > CLIENT_PROPERTY_VALUE_MAX:
            raise _illegal(f"a value may have at most {CLIENT_PROPERTY_VALUE_MAX} characters")
    if sum(len(name) + len(value.encode()) for name, value in properties.items()) > CLIENT_PROPERTIES_BYTES_MAX:
        raise _illegal(f"all properties may have at most {CLIENT_PROPERTIES_BYTES_MAX} bytes")


def _illegal(rule: str) -> CallRefusedError:
    return CallRefusedError(Code.INVALID_CLIENT_PROPERTIES, f"client_properties of the settings: {rule}")


def producer_settings(settings: wire.Settings, max_body_bytes: int) -> wire.Settings:
    """Return the answer to a producer's settings: the settings with the cluster's values. `max_body_bytes`: the maximum
    size of a message's body. Fields that are newer than the gateway stay in the answer."""
    answer = _copied(settings)
    policy = answer.backoff_policy
    policy.max_attempts = PRODUCER_ATTEMPTS
    policy.exponential_backoff.CopyFrom(_exponential(_PRODUCER_FIRST_MS, _PRODUCER_LONGEST_MS))
    answer.publishing.max_body_size = max_body_bytes
    answer.publishing.validate_message_type = True
    return answer


def consumer_settings(settings: wire.Settings, config: GroupConfig, *, fifo: bool) -> wire.Settings:
    """Return the answer to a consumer's settings: the settings with the values of the cluster and the group.

    `config`: the group's settings. `fifo`: whether the group receives a queue's messages in order.
    """
    intervals_ms = [round(time_s * 1000) for time_s in config.retry_intervals_s or RETRY_INTERVALS_S]
    answer = _copied(settings)
    answer.backoff_policy.CopyFrom(retry_policy(settings.user_agent.language, config.retry_max_times, intervals_ms))
    answer.subscription.fifo = fifo
    answer.subscription.receive_batch_size = RECEIVE_BATCH_SIZE
    answer.subscription.long_polling_timeout.CopyFrom(duration(LONG_POLLING_MS))
    return answer


def retry_policy(language: int, retry_max_times: int, intervals_ms: Sequence[int]) -> wire.RetryPolicy:
    """Return a consumer's policy for retries.

    Node's consumers know only the exponential policy. The push consumers of Python, Java and Go need the list of times,
    with at least one entry; Python's rounds down to whole seconds.
    """
    policy = wire.RetryPolicy(max_attempts=retry_max_times + 1)
    if language == Language.NODE_JS:
        first, longest = intervals_ms[0] * _NODE_FACTOR, max(intervals_ms) * _NODE_FACTOR
        policy.exponential_backoff.CopyFrom(_exponential(first, longest))
    else:
        policy.customized_backoff.next.extend(duration(max(time_ms, 1000)) for time_ms in intervals_ms)
    return policy


def _copied(settings: wire.Settings) -> wire.Settings:
    answer = wire.Settings()
    answer.CopyFrom(settings)
    answer.metric.on = False
    return answer


def _exponential(first_ms: int, longest_ms: int) -> wire.ExponentialBackoff:
    return wire.ExponentialBackoff(initial=duration(first_ms), max=duration(longest_ms), multiplier=2.0)
