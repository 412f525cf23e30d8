"""ProducerSettings: the settings of a producer. Each setting has RocketMQ's name, with the unit at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict

from raymq.client.producer.hooks import CheckForbiddenHook, SendMessageHook
from raymq.common.errors import InvalidArgumentError, check_option_names
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES, MESSAGE_SIZE_LIMIT_BYTES
from raymq.common.numbers import LONGEST_TIME_S, POSITIVE, NumberRange, check_fields
from raymq.common.protocol.route import QUEUE_NUMS_MAX
from raymq.records.format.compression import Compression, CompressionType
from raymq.remoting.route_cache import DEFAULT_TOPIC_QUEUE_NUMS

SEND_TIMEOUT_S: Final = 30.0
"""Default of `send_timeout_s`, in seconds; RocketMQ's default is 3 s. A killed storage process restarts within a few
seconds. With the longer default a producer waits for the restart instead of raising an error."""

MAX_BUFFERED_BYTES: Final = 64 * 1024 * 1024
MAX_BUFFERED_MESSAGES: Final = 262_144

SEND_ATTEMPT_TIMEOUT_S: Final = 5.0
"""Default of `attempt_timeout_s`, in seconds, which limits one call of `Storage.append`.

The default is not longer, because the sender looks up the master only after the attempt has ended. If a storage process
hangs, another replica becomes master after about three seconds. The default is not shorter, because the store itself
waits up to 5 s for its disk, and up to 3 s for the replicas' copies.
"""
RANGES: Final = {
    "send_timeout_s": NumberRange(0.001, LONGEST_TIME_S),
    "attempt_timeout_s": NumberRange(0.001, LONGEST_TIME_S),
    "max_buffered_bytes": POSITIVE,
    "max_buffered_messages": POSITIVE,
    "max_message_size_bytes": NumberRange(1, MESSAGE_SIZE_LIMIT_BYTES),
    "default_topic_queue_nums": NumberRange(1, QUEUE_NUMS_MAX),
}
"""The valid range of each numeric setting of a producer."""
WhenFull = Literal["block", "raise"]
"""The behaviour of a send if the buffer is full: wait for space ("block"), or raise SystemBusyError at once
("raise")."""


class ProducerOptions(TypedDict, total=False):
    """The keyword arguments of `Client.producer` and of the other methods that make a producer. ProducerSettings
    explains these arguments."""

    send_timeout_s: float
    attempt_timeout_s: float
    max_buffered_bytes: int
    max_buffered_messages: int
    when_full: WhenFull
    compression: Compression
    max_message_size_bytes: int
    default_topic_queue_nums: int
    send_latency_enable: bool
    retry_when_not_store_ok: bool
    hooks: Sequence[SendMessageHook]
    check_forbidden: Sequence[CheckForbiddenHook]


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """The settings of one producer. Raises InvalidArgumentError if a value is out of range.

    `send_timeout_s`: the time for all attempts of a send together. `attempt_timeout_s`: the time that one attempt waits
    for an answer. `max_buffered_bytes`, `max_buffered_messages`: the maximum of unfinished messages in memory.
    `when_full`: if the buffer is full, a send blocks up to its timeout ("block"), or raises SystemBusyError at once
    ("raise"). `compression`: for bodies of 4 KiB and more, zstd by default. `max_message_size_bytes`: the maximum
    length of a body, at most 1 GiB. A store may have a lower limit.

    `default_topic_queue_nums`: the number of queues per broker group of a topic that is created on first use.
    `send_latency_enable`: skip brokers that answer slowly (raymq.client.producer.senders.latency_fault).
    `retry_when_not_store_ok`: if messages are stored but may not be on disk (a status other than SEND_OK), send them
    again until they are on disk, or until the timeout. RocketMQ sends such messages to another broker instead, and
    stores them twice. `hooks`, `check_forbidden`: see raymq.client.producer.hooks.
    """

    send_timeout_s: float = SEND_TIMEOUT_S
    attempt_timeout_s: float = SEND_ATTEMPT_TIMEOUT_S
    max_buffered_bytes: int = MAX_BUFFERED_BYTES
    max_buffered_messages: int = MAX_BUFFERED_MESSAGES
    when_full: WhenFull = "block"
    compression: Compression = field(default_factory=lambda: Compression(CompressionType.ZSTD))
    max_message_size_bytes: int = MAX_MESSAGE_SIZE_BYTES
    default_topic_queue_nums: int = DEFAULT_TOPIC_QUEUE_NUMS
    send_latency_enable: bool = False
    retry_when_not_store_ok: bool = False
    hooks: Sequence[SendMessageHook] = ()
    check_forbidden: Sequence[CheckForbiddenHook] = ()

    def __post_init__(self) -> None:
        check_fields(self, RANGES)
        if self.when_full not in ("block", "raise"):
            raise InvalidArgumentError(f"when_full must be 'block' or 'raise', not {self.when_full!r}")


def check_repeatable(options: ProducerOptions) -> ProducerOptions:
    """Return the producer settings for a repeatable write, which stores each row once even if it runs again. Such a
    write waits until the buffer has space and the rows are stored safely, and sends each row to a fixed queue. Raises
    InvalidArgumentError, which names each setting that the write would ignore, and for settings that ProducerSettings
    refuses."""
    check_option_names("a repeatable writer", options, ProducerOptions.__annotations__)
    ProducerSettings(**options)
    wrong = [
        f"{name}={options.get(name)!r} ({reason})"
        for name, only, reason in (
            ("when_full", "block", "the write waits for buffer space"),
            ("send_latency_enable", False, "the queue of each row is fixed"),
            ("retry_when_not_store_ok", True, "rows are always sent again until they are stored safely"),
            ("default_topic_queue_nums", None, "the topic must exist"),
        )
        if options.get(name, only) != only
    ]
    if wrong:
        raise InvalidArgumentError(f"a repeatable write cannot use {', '.join(wrong)}: leave it out")
    return {**options, "retry_when_not_store_ok": True}
