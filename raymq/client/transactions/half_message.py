"""The half message: what a transaction producer stores before its local transaction."""

from __future__ import annotations

from typing import Final

from msgspec.structs import force_setattr

from raymq.common.errors import MessageIllegalError
from raymq.common.message import (
    PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_TRANSACTION_PREPARED,
    Message,
)
from raymq.common.names import check_user_topic, is_internal_topic
from raymq.common.numbers import LONGEST_TIME_S, NumberRange, number_in


class HalfMessage(Message, frozen=True, gc=False):
    """A message of a transaction, with the properties that say so. Made by `half_message`."""


IMMUNITY_S: Final = NumberRange(1, int(LONGEST_TIME_S))
"""The ages, in whole seconds, before which nobody asks about the outcome of a half message."""


def half_message(message: Message, group: str, check_immunity_s: int | None = None) -> HalfMessage:
    """`message` as a half message of a producer group. It is not delayed, whatever the message asked for.

    `check_immunity_s`: the age in seconds, 1 or more, before which nobody asks about its outcome; None: the store's
    transaction_time_out_ms. MessageIllegalError for retry and dead-letter topics, IllegalNameError for those of the
    server, InvalidArgumentError for the immunity time.
    """
    if not isinstance(message, Message):
        raise MessageIllegalError(f"expected a raymq.Message, got {type(message).__name__}")
    if is_internal_topic(check_user_topic(message.topic)):
        raise MessageIllegalError(f"a transaction cannot send to {message.topic}, which belongs to a consumer group")
    system = {PROPERTY_TRANSACTION_PREPARED: "true", PROPERTY_PRODUCER_GROUP: group}
    if check_immunity_s is not None:
        age_s = number_in("check_immunity_s", check_immunity_s, IMMUNITY_S)
        system[PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS] = str(age_s)
    half = HalfMessage(
        message.topic,
        message.body,
        message.tags,
        message.keys,
        message.properties,
        message.flag,
        wait_store_msg_ok=message.wait_store_msg_ok,
        light_queues=message.light_queues,
    )
    # Behind the check's back: users may not set these names.
    force_setattr(half, "properties", {**message.properties, **system})
    return half
