"""Messages before they are sent and after they are read, and related values.

A program passes a `Message` to a producer. `MessageExt` is the same message with the store's fields. The names are
RocketMQ's (spec/messaging.md §3). `raymq.records.format.decode` decodes the bytes.

RocketMQ stores tags, keys, the unique id and its own flags in the same property map as the user's properties. In raymq,
`properties` holds only the user's properties. Reserved properties are in attributes and in `system_properties`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import FrozenInstanceError, dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum, IntEnum
from functools import partial
from inspect import Signature, signature
from itertools import repeat
from typing import Any, Final, NoReturn, Protocol, TypeVar

from msgspec import Struct, StructMeta
from msgspec.structs import force_setattr

from raymq.common.errors import BodyUnreadableError, InvalidArgumentError, MessageIllegalError, shortened
from raymq.common.names import LMQ_PREFIX, check_topic, is_light_queue, light_queue
from raymq.common.numbers import INT32_MAX, NUMBER_MAX, POINT_IN_TIME_MS, SECONDS_HINT, number_in, shown, whole_number

PROPERTY_KEYS: Final = "KEYS"
PROPERTY_TAGS: Final = "TAGS"
PROPERTY_WAIT: Final = "WAIT"
PROPERTY_DELAY: Final = "DELAY"
PROPERTY_UNIQ_KEY: Final = "UNIQ_KEY"
PROPERTY_REAL_TOPIC: Final = "REAL_TOPIC"
PROPERTY_REAL_QUEUE_ID: Final = "REAL_QID"
PROPERTY_RETRY_TOPIC: Final = "RETRY_TOPIC"
PROPERTY_ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"
PROPERTY_DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
PROPERTY_DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
PROPERTY_TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
PROPERTY_TIMER_DELETE_KEY: Final = "TIMER_DEL_UNIQKEY"
PROPERTY_INNER_NUM: Final = "INNER_NUM"
PROPERTY_INNER_BASE: Final = "INNER_BASE"
PROPERTY_INNER_MULTI_DISPATCH: Final = "INNER_MULTI_DISPATCH"
PROPERTY_INNER_MULTI_QUEUE_OFFSET: Final = "INNER_MULTI_QUEUE_OFFSET"
PROPERTY_CORRELATION_ID: Final = "CORRELATION_ID"
PROPERTY_REPLY_TO_CLIENT: Final = "REPLY_TO_CLIENT"
PROPERTY_TTL: Final = "TTL"
PROPERTY_CLUSTER: Final = "CLUSTER"
PROPERTY_MESSAGE_TYPE: Final = "MSG_TYPE"
PROPERTY_TRANSACTION_PREPARED: Final = "TRAN_MSG"
PROPERTY_PRODUCER_GROUP: Final = "PGROUP"
PROPERTY_TRANSACTION_ID: Final = "__transactionId__"
PROPERTY_TRANSACTION_CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
PROPERTY_CHECK_IMMUNITY_TIME_IN_SECONDS: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
PROPERTY_PRODUCER_ID: Final = "RMQ_PID"
PROPERTY_PRODUCER_EPOCH: Final = "RMQ_EPOCH"
PROPERTY_SEQUENCE: Final = "RMQ_SEQ"
PROPERTY_PRIORITY: Final = "_SYS_MSG_PRIORITY_"
"""Property with a message's priority, a decimal number. The name is RocketMQ's."""
PROPERTY_SHARDING_KEY: Final = "__SHARDINGKEY"
"""Property with a message's group (sharding key). Clients of a gateway store it; raymq's own producers do not."""
PROPERTY_DLQ_ORIGIN_ERROR: Final = "DLQ_ORIGIN_ERROR"
"""raymq's own property of a dead letter. Its value, in one line, is why the message failed last, or why the group could
not read the message."""

RESERVED_PROPERTIES: Final = frozenset(
    """KEYS TAGS WAIT DELAY REAL_TOPIC REAL_QID RETRY_TOPIC UNIQ_KEY TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET
    ORIGIN_MESSAGE_ID RECONSUME_TIME MAX_RECONSUME_TIMES MSG_REGION TRACE_ON CONSUME_START_TIME INNER_NUM INNER_BASE
    INNER_MULTI_DISPATCH INNER_MULTI_QUEUE_OFFSET CHECK_IMMUNITY_TIME_IN_SECONDS TRAN_PREPARED_QUEUE_OFFSET
    TRANSACTION_CHECK_TIMES CORRELATION_ID REPLY_TO_CLIENT TTL CLUSTER MSG_TYPE POP_CK 1ST_POP_TIME __SHARDINGKEY
    DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID DLQ_ORIGIN_ERROR TIMER_DELAY_SEC TIMER_DELAY_MS TIMER_DELIVER_MS TIMER_OUT_MS
    TIMER_DEL_UNIQKEY TIMER_ROLL_TIMES __transactionId__ __BORNHOST BORN_TIMESTAMP __CRC32# RMQ_PID RMQ_EPOCH
    RMQ_SEQ _SYS_MSG_PRIORITY_""".split()
)
"""Property names that a user may not set: RocketMQ's reserved names (spec/storage.md §1, spec/messaging.md §3.6) and
four names that raymq adds."""

MAX_MESSAGE_SIZE_BYTES: Final = 4 * 1024 * 1024
"""Default maximum size of a message's body: the default of `max_message_size_bytes` in producers and stores."""
MESSAGE_SIZE_LIMIT_BYTES: Final = 1 << 30
"""Upper bound of the `max_message_size_bytes` setting, and so the maximum size of any message's body."""
MAX_PROPERTIES_BYTES: Final = 32767
"""Maximum size in bytes of all properties of a record, with the separators, tags, keys and raymq's own properties."""
USUAL_PROPERTIES_BYTES: Final = MAX_PROPERTIES_BYTES - 1024
"""Maximum size in bytes of a message's properties, tags and keys that always leaves space in the record for raymq's own
properties."""
PRIORITY_MAX: Final = 9
"""Highest priority of a message. The lowest priority is 0."""
PRIORITY_LEVELS: Final = PRIORITY_MAX + 1
"""Number of priorities, and so of the levels of a PRIORITY topic in each broker group."""
LIGHT_QUEUES_MAX: Final = 500
"""Maximum number of light queues that one message may name."""
DELAY_LEVELS_MAX: Final = 18
"""Number of delay levels in RocketMQ's default `message_delay_level`, and the highest delay level."""
TIMER_DELAY_MAX_MS: Final = 40 * 86_400_000
"""Maximum delay of a message in ms: the time from now to the message's `deliver_at_ms`."""


class _NoProperties(dict[str, str]):
    """An immutable, empty mapping, which is the `properties` of every message that has only a topic and a body."""

    __slots__ = ()

    def _refuse(self, *args: Any, **more: Any) -> NoReturn:
        raise TypeError("a message is immutable: pass properties when you create the message")

    __setitem__ = __ior__ = update = setdefault = _refuse

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[()]]:
        return dict, ()


PLAIN_PROPERTIES: Final = _NoProperties()
"""The `properties` object of each Message that has only a topic and a body. No other message has this object, so a
comparison by identity recognises such messages. Such messages are the most common messages and need less work."""

_PRIORITY_DIGITS_MAX: Final = 10
"""Number of digits of the greatest priority that a native client can send: a Java int."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_NO_KEYS: Final = ()
_NO_FLAG: Final = 0
_LEGAL_TOPICS_MAX: Final = 4096
_LEGAL_TOPICS: Final[set[str]] = set()
"""Cache of topic names that `check_topic` has accepted, with at most _LEGAL_TOPICS_MAX names."""


def _check_text(what: str, text: object) -> None:
    """Raise an error if `text` cannot be stored in a record's property string, which uses 0x01 and 0x02 as separators
    and has no escape character."""
    if not isinstance(text, str):
        raise MessageIllegalError(f"{shortened(what)} must be a str, not {type(text).__name__}")
    if not text.strip():
        raise MessageIllegalError(f"{shortened(what)} is blank")
    if "\x01" in text or "\x02" in text:
        raise MessageIllegalError(
            f"{shortened(what)} {shown(text)} contains \\x01 or \\x02, which separate properties on disk"
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MessageIllegalError(f"{shortened(what)} {shown(text)} cannot be written as UTF-8") from None


def _checked_number(name: str, value: object, low: int = 0, high: int = NUMBER_MAX) -> int:
    """Return the value of the message field `name` as an integer from `low` to `high`. Raises MessageIllegalError if
    the value is not such a number."""
    try:
        return whole_number(name, value, low, high)
    except InvalidArgumentError as error:
        raise MessageIllegalError(str(error)) from None


def _checked_time(name: str, value: object) -> int:
    """Return the value of the message field `name` as a point in time in ms since 1970. Raises MessageIllegalError if
    the value is not such a number."""
    try:
        return int(number_in(name, value, POINT_IN_TIME_MS))
    except InvalidArgumentError as error:
        raise MessageIllegalError(str(error)) from None


class Message(Struct, frozen=True, gc=False):
    """A message to send.

    `topic`: the topic's name. `body`: 1 byte to 4 MiB, or to 1 GiB if `max_message_size_bytes` of the producer and of
    the store allow this size. `tags`: one tag, for subscriptions such as ``"paid || refunded"``. `keys`: business keys
    for lookups, without spaces; a single str is one key. `properties`: the user's own properties, text to text. `flag`:
    a 32-bit number that consumers get unchanged. The constructor raises MessageIllegalError if a field breaks a rule,
    and IllegalNameError if the topic name breaks a rule (spec/messaging.md §3.2).

    A message is delayed by one of four arguments. `delay_level` is RocketMQ's delay level. Levels 1 to 18 mean 1 s to 2
    h unless the store's message_delay_level differs; 0 is no delay. If the store has fewer levels, a higher level means
    the store's last level. `deliver_at_ms` is a time in ms since 1970, up to 40 days ahead; a time in the past means
    now. Times before 2001, except 0, are refused as seconds. `deliver_at` is the same time as a datetime with a time
    zone. `delay` is a timedelta, up to 40 days, that begins when the message is created. The message keeps both as
    `deliver_at_ms`, and its fields `deliver_at` and `delay` are None.

    `wait_store_msg_ok` False: the send is acknowledged when the store has written the message. The message then
    survives the death of the store's process, but not a power cut or the loss of its node. Consumers see the message at
    the same time as other messages.

    `priority`: 0, the lowest priority, to 9, for topics of the type PRIORITY. The producer sends the message to the
    queue of its priority, and consumers that lease messages get queues of a high priority sooner. The priority is
    stored as a property; topics that accept all types store it, too, but do not use it. A message with a delay has no
    priority.

    `light_queues`: names of up to 500 light queues that also contain the message, without a second copy of the message;
    a single str is one name. Light queues need the store settings enable_lmq and enable_multi_dispatch; see
    `raymq.light_queue`.

    A message is immutable. The garbage collector does not track a message, because it contains only text, bytes and
    numbers.
    """

    topic: str
    body: bytes
    tags: str | None = None
    keys: Sequence[str] = ()
    properties: Mapping[str, str] = PLAIN_PROPERTIES
    flag: int = 0
    delay_level: int = 0
    deliver_at_ms: int | None = None
    wait_store_msg_ok: bool = True
    light_queues: Sequence[str] = ()
    delay: timedelta | None = None
    deliver_at: datetime | None = None
    priority: int | None = None

    def __post_init__(self) -> None:
        body, topic = self.body, self.topic
        if (
            self.properties is PLAIN_PROPERTIES
            and topic.__class__ is str
            and topic in _LEGAL_TOPICS
            and body.__class__ is bytes
            and 0 < len(body) <= MESSAGE_SIZE_LIMIT_BYTES
            and self.tags is None
            and self.keys is _NO_KEYS
            and self.flag is _NO_FLAG
            and self.delay_level is _NO_FLAG
            and self.deliver_at_ms is None
            and self.wait_store_msg_ok is True
            and self.light_queues is _NO_KEYS
            and self.delay is None
            and self.deliver_at is None
            and self.priority is None
        ):
            return  # skip the checks below, which a message with only a topic and a body does not need
        self._check()
        if (
            self.tags is None
            and not (self.keys or self.properties or self.flag or self.delay_level or self.light_queues)
            and self.deliver_at_ms is None
            and self.wait_store_msg_ok
            and self.priority is None
        ):
            force_setattr(self, "properties", PLAIN_PROPERTIES)
        else:
            # copy the properties, because the caller may change its own mapping later
            added = {} if self.priority is None else {PROPERTY_PRIORITY: str(self.priority)}
            force_setattr(self, "properties", {**self.properties, **added})

    def _check(self) -> None:
        self._check_topic_and_body()
        self._check_tags_and_keys()
        self._check_properties()
        if self.flag.__class__ is not int or not -(2**31) <= self.flag <= INT32_MAX:
            force_setattr(self, "flag", _checked_number("flag", self.flag, -(2**31), INT32_MAX))
        if not isinstance(self.wait_store_msg_ok, bool):
            raise MessageIllegalError(f"wait_store_msg_ok {self.wait_store_msg_ok!r} is not a bool")
        if self.delay is not None or self.deliver_at is not None:
            self._set_delivery_time()
        elif self.delay_level or self.deliver_at_ms is not None or self.delay_level.__class__ is not int:
            self._check_delay()
        if self.light_queues or self.light_queues.__class__ is not tuple:
            self._check_light_queues()
        if self.priority is not None:
            self._check_priority()

    def _check_topic_and_body(self) -> None:
        check_topic(self.topic)
        if self.topic.__class__ is str and len(_LEGAL_TOPICS) < _LEGAL_TOPICS_MAX:
            _LEGAL_TOPICS.add(self.topic)
        if not isinstance(self.body, bytes):
            if not isinstance(self.body, (bytearray, memoryview)):
                kind = type(self.body).__name__
                raise MessageIllegalError(f"a message body must be bytes, not {kind}; encode it first")
            force_setattr(self, "body", bytes(self.body))
        if not self.body:
            raise MessageIllegalError("a message body must not be empty")
        if len(self.body) > MESSAGE_SIZE_LIMIT_BYTES:
            raise MessageIllegalError(
                f"a message body of {len(self.body)} bytes exceeds the limit of {MESSAGE_SIZE_LIMIT_BYTES} bytes "
                "(1 GiB): send a reference to the data, or split it"
            )

    def _check_tags_and_keys(self) -> None:
        if self.tags is not None:
            self._check_tag(self.tags)
        if self.keys.__class__ is not tuple:
            if not isinstance(self.keys, Iterable):
                raise MessageIllegalError(f"keys must be a str or a sequence of str, not {type(self.keys).__name__}")
            force_setattr(self, "keys", (self.keys,) if isinstance(self.keys, str) else tuple(self.keys))
        for key in self.keys:
            _check_text("a key", key)
            if " " in key:
                raise MessageIllegalError(f"key {shown(key)} contains a space, which separates keys on disk")

    def _check_tag(self, tag: str) -> None:
        _check_text("a tag", tag)
        if tag == "*" or "||" in tag or tag != tag.strip():
            raise MessageIllegalError(
                f"tag {shown(tag)} is not legal, because consumers could not subscribe to it: a message has one tag, "
                "without '||' or spaces at its ends, and not '*', which subscribes to all tags"
            )

    def _check_properties(self) -> None:
        if self.properties.__class__ is not dict and not isinstance(self.properties, Mapping):
            raise MessageIllegalError(f"properties must map names to values, not be a {type(self.properties).__name__}")
        for name, value in self.properties.items():
            _check_text("a property name", name)
            _check_text(f"the value of property {name!r}", value)
            # A copy of a message with a priority gets the property of the priority with the other properties.
            if name in RESERVED_PROPERTIES and (name != PROPERTY_PRIORITY or self.priority is None):
                raise MessageIllegalError(f"property {shown(name)} is reserved; use another name")

    def _check_priority(self) -> None:
        force_setattr(self, "priority", _checked_number("priority", self.priority, 0, PRIORITY_MAX))
        if self.delay_level or self.deliver_at_ms is not None:
            raise MessageIllegalError("a message has a priority or a delay, not both: leave one out")

    def _check_light_queues(self) -> None:
        names = self.light_queues
        if not isinstance(names, Iterable):
            raise MessageIllegalError(f"light_queues must be a str or a sequence of str, not {type(names).__name__}")
        names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
        if len(names) > LIGHT_QUEUES_MAX:
            raise MessageIllegalError(
                f"a message may be in at most {LIGHT_QUEUES_MAX} light queues, not in {len(names)}"
            )
        for name in names:
            light_queue(name)
        force_setattr(self, "light_queues", names)

    def _check_delay(self) -> None:
        level, deliver_at_ms = self.delay_level, self.deliver_at_ms
        level = _checked_number("delay_level", level, 0, DELAY_LEVELS_MAX)
        force_setattr(self, "delay_level", level)
        if deliver_at_ms is None:
            return
        if level:
            raise MessageIllegalError("delay_level and deliver_at_ms exclude each other: pass only one of them")
        deliver_at_ms = _checked_time("deliver_at_ms", deliver_at_ms)
        force_setattr(self, "deliver_at_ms", deliver_at_ms)
        ahead_ms = deliver_at_ms - time.time_ns() // 1_000_000
        if ahead_ms > TIMER_DELAY_MAX_MS:
            raise MessageIllegalError(f"deliver_at_ms {deliver_at_ms} is {_too_far(ahead_ms)} ({SECONDS_HINT})")

    def _set_delivery_time(self) -> None:
        """Set `deliver_at_ms` from `delay` or `deliver_at`, and set these fields to None."""
        fields = ("delay_level", "deliver_at_ms", "delay", "deliver_at")
        given = [name for name in fields if getattr(self, name) not in (None, 0)]
        if len(given) != 1:
            raise MessageIllegalError(f"a message has one of {', '.join(fields)}, not {' and '.join(given)} together")
        now_ms = time.time_ns() // 1_000_000
        due_ms = now_ms + _delay_ms(self.delay) if self.delay is not None else _time_ms(self.deliver_at)
        if due_ms - now_ms > TIMER_DELAY_MAX_MS:
            raise MessageIllegalError(f"{given[0]} {getattr(self, given[0])} is {_too_far(due_ms - now_ms)}")
        force_setattr(self, "deliver_at_ms", due_ms)
        force_setattr(self, "delay", None)
        force_setattr(self, "deliver_at", None)


def _delay_ms(delay: object) -> int:
    """Return a delay in ms, rounded up. Raises MessageIllegalError if the delay is not a timedelta of 0 or more."""
    if not isinstance(delay, timedelta):
        raise MessageIllegalError(f"delay must be a timedelta, such as timedelta(seconds=30), not {shown(delay)}")
    if delay < timedelta():
        raise MessageIllegalError(f"delay must not be negative, and is {delay}")
    return -(delay // -_MILLISECOND)


def _time_ms(moment: object) -> int:
    """Return a point in time in ms since 1970, rounded up; 0 for times before 1970. Raises MessageIllegalError if it is
    not a datetime with a time zone."""
    if not isinstance(moment, datetime):
        raise MessageIllegalError(f"deliver_at must be a datetime with a time zone, not {shown(moment)}")
    if moment.utcoffset() is None:
        raise MessageIllegalError(
            f"deliver_at {moment} has no time zone: write datetime.now(UTC) + timedelta(…), or call .astimezone() on a "
            "time of this machine's zone"
        )
    return max(-((moment - _EPOCH) // -_MILLISECOND), 0)


def _too_far(ahead_ms: int) -> str:
    days = f"{ahead_ms / 86_400_000:.1f}"
    return f"{days} days ahead; at most {TIMER_DELAY_MAX_MS // 86_400_000} days are allowed"


class SystemMessage(Message, frozen=True, gc=False):
    """A message that raymq itself sends. The message may have reserved properties, and may be sent to a system topic.
    Its tag may be one to which nobody can subscribe, because it may be a copy of a message that RocketMQ stored."""

    def _check_tag(self, tag: str) -> None:
        _check_text("a tag", tag)

    def _check_properties(self) -> None:
        for name, value in self.properties.items():
            _check_text("a property name", name)
            _check_text(f"the value of property {name!r}", value)


AnyMessage = TypeVar("AnyMessage", bound=Message)


def with_added_properties(message: AnyMessage, properties: Mapping[str, str]) -> AnyMessage:
    """Return a copy of a message that also has `properties`, for properties that raymq itself adds.

    The copy is not checked again. The checks are for the fields that a user sets: they would refuse the reserved
    properties of a half message, and would count the added properties as the user's.
    """
    copied = copy(message)
    force_setattr(copied, "properties", {**message.properties, **properties})
    return copied


class MessageSource(Protocol):
    """A source of messages that decodes a field when the field is read. The source has one method for each field of
    MessageExt. The method has the field's name and takes the message's index. This protocol declares only the methods
    that are called most."""

    def body(self, index: int) -> bytes:
        """Return the decompressed body of message `index`. Raises BodyUnreadableError if the body cannot be
        read."""

    def body_error(self, index: int) -> BodyUnreadableError | None:
        """Return the error that `body` raises for message `index`; None if the body can be read."""

    def body_prefix(self, index: int, max_bytes: int) -> bytes:
        """Return the first `max_bytes` bytes of the body of message `index`. Raises BodyUnreadableError if this part of
        the body cannot be read."""

    def queue_offset(self, index: int) -> int:
        """Return the queue offset of message `index`."""


@dataclass(frozen=True, init=False)
class _MessageFields:
    """The fields of a MessageExt, and the methods that compare, show, copy and replace the message."""

    __slots__ = ()

    topic: str
    body: bytes
    tags: str | None
    keys: tuple[str, ...]
    properties: Mapping[str, str]
    flag: int
    broker_name: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    born_timestamp_ms: int
    store_timestamp_ms: int
    born_host: str
    store_host: str
    message_id: str
    offset_message_id: str
    reconsume_times: int
    sys_flag: int
    system_properties: Mapping[str, str]


class _MessageType(StructMeta):
    """The metaclass of MessageExt. It lets MessageExt(...) create a message from the values of all fields, and lets
    `match` patterns use the fields."""

    @property
    def __match_args__(self) -> tuple[str, ...]:  # type: ignore[override]  # type stubs of msgspec call it writable
        return _FIELDS

    @property
    def __signature__(self) -> Signature:
        return signature(self.__call__)

    def __call__(
        self,
        topic: str,
        body: bytes,
        tags: str | None,
        keys: tuple[str, ...],
        properties: Mapping[str, str],
        flag: int,
        broker_name: str,
        queue_id: int,
        queue_offset: int,
        physical_offset: int,
        born_timestamp_ms: int,
        store_timestamp_ms: int,
        born_host: str,
        store_host: str,
        message_id: str,
        offset_message_id: str,
        reconsume_times: int,
        sys_flag: int,
        system_properties: Mapping[str, str],
    ) -> MessageExt:
        return MessageExt.decoded(
            (
                *(topic, body, tags, keys, properties, flag, broker_name, queue_id, queue_offset, physical_offset),
                *(born_timestamp_ms, store_timestamp_ms, born_host, store_host, message_id, offset_message_id),
                *(reconsume_times, sys_flag, system_properties),
            )
        )


class _MessagePlace(Struct, eq=False, gc=False):
    """The source that decodes a message's fields, and the message's index in this source. The garbage collector does
    not count these objects. If it did, a few polls of thousands of messages would start a scan of all objects of the
    program."""

    _source: MessageSource
    _index: int


# MessageExt is not declared frozen for msgspec, because its own __setattr__ refuses changes.
class MessageExt(_MessageFields, _MessagePlace, metaclass=_MessageType, eq=False, gc=False):  # type: ignore[misc]
    """A message as a consumer gets it.

    `queue_offset` counts messages in the queue from 0. `physical_offset` counts bytes in the broker group's commit log.
    Timestamps are milliseconds since 1970: `born` by the producer's clock, `store` by the store's clock. `message_id`
    is the producer's unique id and stays the same over retries; `offset_message_id` names this one record.

    A message from a poll refers to the bytes that the poll read, whose CRC was checked. It decodes a field each time
    the field is read. On the storage actor's node these bytes are the mapped commit log; on other nodes they are the
    result of one fetch of up to 8 MiB. The bytes stay in memory, or in a deleted file on the disk, while any message of
    the poll exists. A program that keeps messages for a long time should keep `copy.copy(message)`, which does not
    refer to the poll's bytes. Pickling also copies the bytes.

    A damaged message is delivered too: reading its `body` raises BodyUnreadableError, and `body_error` holds the error.
    A compressed body is decompressed when the body is read. The decompressed size is limited to the largest
    `max_message_size_bytes` of the stores that the process reads, at least 4 MiB. If the record itself is damaged
    (`body_error.record_damaged`), only topic, broker name, queue id, queue offset and physical offset are known; text
    fields are empty, and numbers are 0.
    """

    @staticmethod
    def decoded(values: tuple[Any, ...]) -> MessageExt:
        """Return a message with the values of all fields, in field order. The result equals `MessageExt(*values)`, but
        is created faster."""
        return _make_message(_DecodedMessage(values), 0)

    @staticmethod
    def of_source(source: MessageSource, indices: Iterable[int]) -> list[MessageExt]:
        """Return the messages at the given indices of `source`, the object that decodes their fields."""
        # Let `map` create the messages in C code: a poll creates thousands of messages, and Python code for each would
        # be slow.
        return list(map(_make_message, repeat(source), indices))

    @staticmethod
    def damaged(error: BodyUnreadableError, queue: MessageQueue) -> MessageExt:
        """Return a message that stands for a damaged record of `queue`. Only the message's queue and offsets
        are known."""
        place = (queue.broker_name, queue.queue_id, error.queue_offset, error.physical_offset)
        return MessageExt.decoded((queue.topic, error, None, (), {}, 0, *place, 0, 0, "", "", "", "", 0, 0, {}))

    @property
    def body_error(self) -> BodyUnreadableError | None:
        """The error that reading `body` raises; None if the body can be read.

        The first access to this property decompresses a compressed body.
        """
        error: BodyUnreadableError | None = self._source.body_error(self._index)
        return error

    @property
    def record_damaged(self) -> bool:
        """True if the record itself is damaged, so that only the message's queue and offsets are known. Reading this
        property does not read the body."""
        return not self.offset_message_id

    def _body_prefix(self, max_bytes: int) -> bytes:
        """Return the first `max_bytes` bytes of `body` without decompressing the rest of the body, for a preview.

        Raises BodyUnreadableError if these bytes cannot be read. Damage in later compressed bytes is not detected.
        """
        prefix: bytes = self._source.body_prefix(self._index, max_bytes)
        return prefix

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(_FIELDS, self._values(), strict=True))
        return f"{type(self).__qualname__}({fields})"

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # a message has dictionaries

    def __reduce__(self) -> tuple[Any, ...]:
        return MessageExt, self._values()

    def __copy__(self) -> MessageExt:
        return MessageExt.decoded(self._values())

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _in_queue(self, topic: str, queue_id: int) -> MessageExt:
        """Return a copy of this message with another topic and queue id: the queue to which the message was
        sent."""
        return self._replaced(topic=topic, queue_id=queue_id)

    def _replaced(self, **changes: Any) -> MessageExt:
        """Return a copy of this message in which the named fields have other values. (dataclasses.replace cannot copy a
        message with an unreadable body.)"""
        values = zip(_FIELDS, self._values(), strict=True)
        return MessageExt.decoded(tuple([changes.get(name, value) for name, value in values]))

    def _values(self) -> tuple[Any, ...]:
        """Return the values of all fields in order. The value of an unreadable body is the BodyUnreadableError."""
        error = self.body_error
        return tuple([getattr(self, name) if error is None or name != "body" else error for name in _FIELDS])

    @property
    def queue(self) -> MessageQueue:
        """The queue from which the message was read."""
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    @property
    def priority(self) -> int | None:
        """The priority with which the message was sent; None if it was sent without a priority. A native client of
        RocketMQ may send priorities above 9."""
        text = self.system_properties.get(PROPERTY_PRIORITY, "")
        return int(text) if text.isascii() and text.isdecimal() and len(text) <= _PRIORITY_DIGITS_MAX else None

    @property
    def light_queues(self) -> tuple[str, ...]:
        """The names of the light queues to which the message was also sent. If the message was read from a light queue,
        `topic` and `queue_offset` belong to the light queue, and `sent_to` is the original topic."""
        names = self.system_properties.get(PROPERTY_INNER_MULTI_DISPATCH, "").split(",")
        return tuple(name.removeprefix(LMQ_PREFIX) for name in names if name)

    @property
    def sent_to(self) -> str:
        """The topic to which the message was sent. It differs from `topic` for a message read from a light queue."""
        return self.system_properties.get(PROPERTY_REAL_TOPIC, self.topic) if is_light_queue(self.topic) else self.topic


_make_message: Final[Callable[[Any, int], MessageExt]] = partial(StructMeta.__call__, MessageExt)
"""Function that creates a MessageExt. Its arguments are a source, which decodes the fields of messages, and the
message's index in this source."""
_FIELDS: Final[tuple[str, ...]] = _MessageFields.__match_args__
_BODY: Final = _FIELDS.index("body")


class _DecodedMessage:
    """A message source that contains one message, whose fields are all decoded."""

    __slots__ = ("_values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values

    def body(self, index: int) -> bytes:
        body: bytes | BodyUnreadableError = self._values[_BODY]
        if isinstance(body, BodyUnreadableError):
            raise BodyUnreadableError(*body.args)
        return body

    def body_prefix(self, index: int, max_bytes: int) -> bytes:
        return self.body(index)[:max_bytes]

    def body_error(self, index: int) -> BodyUnreadableError | None:
        body = self._values[_BODY]
        return body if isinstance(body, BodyUnreadableError) else None


def _read_value(number: int) -> Callable[[Any, int], Any]:
    return lambda self, index: self._values[number]


def _read_field(name: str) -> property:
    # The field `body` is read for every message, so its property calls `body()` directly, without a method lookup by
    # name.
    if name == "body":
        return property(lambda self: self._source.body(self._index))
    return property(lambda self: getattr(self._source, name)(self._index))


for _number, _name in enumerate(_FIELDS):
    # Define the fields' properties only after the decorator has made the class. In the class body they would become
    # default values of the fields.
    if _name != "body":
        setattr(_DecodedMessage, _name, _read_value(_number))
    setattr(_MessageFields, _name, _read_field(_name))


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """One queue of a topic. Queues are sorted by topic, then broker name, then queue id (spec/messaging.md,
    vocabulary)."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


def checked_queue(name: str, queue: object) -> MessageQueue:
    """Return `queue` if it is a MessageQueue with a valid queue id, else raise InvalidArgumentError. `name`: the
    argument's name in the error. A queue id that is a numpy integer becomes an int."""
    if not isinstance(queue, MessageQueue):
        raise InvalidArgumentError(f"{name}: expected a raymq.MessageQueue, not {queue!r}")
    if type(queue.queue_id) is int and 0 <= queue.queue_id <= INT32_MAX:
        return queue
    return replace(queue, queue_id=whole_number(f"{name}: queue_id", queue.queue_id, 0, INT32_MAX))


class SendStatus(Enum):
    """The durability of an acknowledged message. In all four states the message is stored (spec/messaging.md §2.6)."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class SendResult(Struct, frozen=True, gc=False):
    """The result of one sent message: its queue and offset. `message_id`: the unique id. `offset_message_id`: the id
    that contains the physical offset of the message's record. `recall_handle`: the text with which `Producer.recall`
    recalls a message that waits for its `deliver_at_ms`; None for messages without `deliver_at_ms`."""

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    recall_handle: str | None = None


class PullStatus(Enum):
    """The outcome of a read of one queue. The values are RocketMQ's."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of one read of one queue. `next_offset`: the offset at which to continue reading. `max_offset`: the
    offset that the queue's next message will get."""

    status: PullStatus
    messages: tuple[MessageExt, ...]
    next_offset: int
    min_offset: int
    max_offset: int


class ConsumeStatus(IntEnum):
    """The status that a listener returns. Returning None means CONSUME_SUCCESS; raising an exception means
    RECONSUME_LATER. A plain number is not a valid status."""

    CONSUME_SUCCESS = 0
    RECONSUME_LATER = 1


class MessageModel(Enum):
    """How a consumer group shares a topic. CLUSTERING divides the topic's queues among the group's members;
    BROADCASTING gives each member all queues."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFromWhere(Enum):
    """The position at which a group starts in each queue in which the group has committed no offset
    (spec/messaging.md §5.4).

    CONSUME_FROM_LAST_OFFSET, RocketMQ's default: the end of the queue, but the first message while the queue is young.
    A queue is young while its first message is still in the store's memory.
    CONSUME_FROM_END: the end of the queue, whatever the queue's age. The group skips the messages that a queue receives
    before the group first reads the queue. This also applies to queues that are added later.
    CONSUME_FROM_FIRST_OFFSET: the first stored message of the queue.
    CONSUME_FROM_TIMESTAMP: the first message of the queue that was stored at a given time or later.
    """

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"
    CONSUME_FROM_END = "CONSUME_FROM_END"


def copied_message(message: MessageExt, topic: str, added: Mapping[str, str]) -> SystemMessage:
    """Return a received message as a message to `topic` that also has the properties `added`. The copy has the
    message's priority, and is not checked, because it must be possible to send each stored message again. RocketMQ's
    clients send messages that break a rule of Message, for example with a space before the tag."""
    copied = SystemMessage(topic, b"-")
    fields = (message.body, message.tags, message.keys, {**message.properties, **added}, message.flag)
    for name, value in zip(("body", "tags", "keys", "properties", "flag"), fields, strict=True):
        force_setattr(copied, name, value)
    if message.priority is not None:
        force_setattr(copied, "priority", message.priority)
        copied = with_added_properties(copied, {PROPERTY_PRIORITY: str(message.priority)})
    return copied


def not_a_message(value: object) -> str:
    """Return the text of the error for a send of `value`, which is no Message."""
    return f"expected a raymq.Message, got {type(value).__name__}: write raymq.Message(topic, body)"


def message_list(messages: Iterable[Message]) -> list[Message]:
    """Return `messages` as a list. If an item is not a Message, raises MessageIllegalError, which names the first such
    item."""
    result = list(messages)
    if any(kind is not Message for kind in set(map(type, result))):
        for message in result:
            if not isinstance(message, Message):
                raise MessageIllegalError(not_a_message(message))
    return result
