"""Messages, before they are sent and after they were read, and the small values around them.

`Message` is what users hand to a producer; `MessageExt` is the same message with what the store added. The names are
RocketMQ's (spec/messaging.md §3). The bytes are in `raymq.records.format.decode`.

Properties: RocketMQ keeps tags, keys, the unique id and its own flags in one map beside the user's properties. Here
`properties` holds the user's alone, and reserved properties, raymq's and RocketMQ's, are in attributes and
`system_properties`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from enum import Enum, IntEnum
from functools import partial
from inspect import Signature, signature
from itertools import repeat
from typing import Any, Final, NoReturn, Protocol

from msgspec import Struct, StructMeta
from msgspec.structs import force_setattr

from raymq.common.errors import BodyUnreadableError, InvalidArgumentError, MessageIllegalError
from raymq.common.names import LMQ_PREFIX, check_topic, is_light_queue, light_queue
from raymq.common.numbers import INT32_MAX, NUMBER_MAX, whole_number

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
PROPERTY_DLQ_ORIGIN_ERROR: Final = "DLQ_ORIGIN_ERROR"
"""Of a dead letter: why it failed last, or why its group could not read the message, in a line; raymq's own."""

RESERVED_PROPERTIES: Final = frozenset(
    """KEYS TAGS WAIT DELAY REAL_TOPIC REAL_QID RETRY_TOPIC UNIQ_KEY TRAN_MSG PGROUP MIN_OFFSET MAX_OFFSET
    ORIGIN_MESSAGE_ID RECONSUME_TIME MAX_RECONSUME_TIMES MSG_REGION TRACE_ON CONSUME_START_TIME INNER_NUM INNER_BASE
    INNER_MULTI_DISPATCH INNER_MULTI_QUEUE_OFFSET CHECK_IMMUNITY_TIME_IN_SECONDS TRAN_PREPARED_QUEUE_OFFSET
    TRANSACTION_CHECK_TIMES CORRELATION_ID REPLY_TO_CLIENT TTL CLUSTER MSG_TYPE POP_CK 1ST_POP_TIME __SHARDINGKEY
    DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID DLQ_ORIGIN_ERROR TIMER_DELAY_SEC TIMER_DELAY_MS TIMER_DELIVER_MS TIMER_OUT_MS
    TIMER_DEL_UNIQKEY TIMER_ROLL_TIMES __transactionId__ __CRC32# RMQ_PID RMQ_EPOCH RMQ_SEQ""".split()
)
"""Property names a user may not set (spec/storage.md §1, spec/messaging.md §3.6, and raymq's own four)."""

MAX_MESSAGE_SIZE_BYTES: Final = 4 * 1024 * 1024
"""The longest body by default: the `max_message_size_bytes` of a producer and of a store."""
MESSAGE_SIZE_LIMIT_BYTES: Final = 1 << 30
"""The most that `max_message_size_bytes` may be, and so the longest body of any message."""
MAX_PROPERTIES_BYTES: Final = 32767
LIGHT_QUEUES_MAX: Final = 500
"""The most light queues that one message may be in."""
TIMER_DELAY_MAX_MS: Final = 40 * 86_400_000
"""The bound on how far ahead a message's `deliver_at_ms` may be."""


class _NoProperties(dict[str, str]):
    """No properties, for ever: those of all messages that have nothing but a topic and a body."""

    __slots__ = ()

    def _refuse(self, *args: Any, **more: Any) -> NoReturn:
        raise TypeError("a message is not changed after it was made; make one with properties")

    __setitem__ = __ior__ = update = setdefault = _refuse

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[()]]:
        return dict, ()


PLAIN_PROPERTIES: Final = _NoProperties()
"""The `properties` of each Message that has a topic and a body and nothing else, and of no other one: so a look at them
tells such a message, which most are, from one that takes more work."""

_NO_KEYS: Final = ()
_NO_FLAG: Final = 0
_LEGAL_TOPICS_MAX: Final = 4096
_LEGAL_TOPICS: Final[set[str]] = set()
"""Names that `check_topic` has found legal, at most _LEGAL_TOPICS_MAX of them."""


def _check_text(what: str, text: object) -> None:
    """Refuse what the property string cannot carry: it separates with 0x01 and 0x02 and has no escape."""
    if not isinstance(text, str):
        raise MessageIllegalError(f"{what} must be a str, not {type(text).__name__}")
    if not text.strip():
        raise MessageIllegalError(f"{what} is blank")
    if "\x01" in text or "\x02" in text:
        raise MessageIllegalError(f"{what} {text!r} contains \\x01 or \\x02, which separate properties on disk")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MessageIllegalError(f"{what} {text!r} cannot be written as UTF-8") from None


def _checked_number(name: str, value: object, low: int = 0, high: int = NUMBER_MAX) -> int:
    """The field `name` as a whole number from `low` to `high`. MessageIllegalError."""
    try:
        return whole_number(name, value, low, high)
    except InvalidArgumentError as error:
        raise MessageIllegalError(str(error)) from None


class Message(Struct, frozen=True, gc=False):
    """A message to send.

    `topic`: where to. `body`: 1 byte to 4 MiB, or to 1 GiB where `max_message_size_bytes` of the producer and of the
    store allow it. `tags`: one tag, for subscriptions such as ``"paid || refunded"``. `keys`: business keys for
    lookups, without spaces; a single str is one key. `properties`: the user's own, text to text. `flag`: a 32-bit
    number that is carried along. Raises MessageIllegalError (and IllegalNameError for the topic) when it is made
    (spec/messaging.md §3.2).

    Consumers get the message later with one of: `delay_level`, RocketMQ's (1 to 18 mean 1 s to 2 h unless the store's
    message_delay_level says otherwise; 0 is no delay, more than 18 means 18), or `deliver_at_ms`, a time in ms since
    1970 up to 40 days ahead; a time that is past is now.

    `wait_store_msg_ok` False: the send is acknowledged once the store has written the message, which then survives the
    store's process, and not a power cut or the loss of its node; consumers see it when any other would be seen.

    `light_queues`: names of up to 500 light queues that get the message, too, without a copy of it; a single str is one
    name. The store needs enable_lmq and enable_multi_dispatch for that; see `raymq.light_queue`.

    A message is not changed after it was made, and the garbage collector does not track it: it holds nothing but text,
    bytes and numbers.
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
        ):
            return  # a message of a topic and a body, which are most
        self._check()
        if (
            self.tags is None
            and not (self.keys or self.properties or self.flag or self.delay_level or self.light_queues)
            and self.deliver_at_ms is None
            and self.wait_store_msg_ok
        ):
            force_setattr(self, "properties", PLAIN_PROPERTIES)
        else:
            force_setattr(self, "properties", dict(self.properties))  # the caller's may change after the checks

    def _check(self) -> None:
        self._check_topic_and_body()
        self._check_tags_and_keys()
        self._check_properties()
        if self.flag.__class__ is not int or not -(2**31) <= self.flag <= INT32_MAX:
            force_setattr(self, "flag", _checked_number("flag", self.flag, -(2**31), INT32_MAX))
        if not isinstance(self.wait_store_msg_ok, bool):
            raise MessageIllegalError(f"wait_store_msg_ok {self.wait_store_msg_ok!r} is not a bool")
        if self.delay_level or self.deliver_at_ms is not None or self.delay_level.__class__ is not int:
            self._check_delay()
        if self.light_queues or self.light_queues.__class__ is not tuple:
            self._check_light_queues()

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
            _check_text("a tag", self.tags)
            if "||" in self.tags or self.tags != self.tags.strip():
                raise MessageIllegalError(
                    f"tag {self.tags!r} cannot be subscribed to: a message has one tag, without '||' or spaces at "
                    "its ends"
                )
        if self.keys.__class__ is not tuple:
            if not isinstance(self.keys, Iterable):
                raise MessageIllegalError(f"keys must be a str or several, not {type(self.keys).__name__}")
            force_setattr(self, "keys", (self.keys,) if isinstance(self.keys, str) else tuple(self.keys))
        for key in self.keys:
            _check_text("a key", key)
            if " " in key:
                raise MessageIllegalError(f"key {key!r} contains a space, which separates keys on disk")

    def _check_properties(self) -> None:
        if self.properties.__class__ is not dict and not isinstance(self.properties, Mapping):
            raise MessageIllegalError(f"properties must map names to values, not be a {type(self.properties).__name__}")
        for name, value in self.properties.items():
            _check_text("a property name", name)
            _check_text(f"the value of property {name!r}", value)
            if name in RESERVED_PROPERTIES:
                raise MessageIllegalError(f"property {name!r} is reserved; use another name")

    def _check_light_queues(self) -> None:
        names = self.light_queues
        if not isinstance(names, Iterable):
            raise MessageIllegalError(f"light_queues must be a str or several, not {type(names).__name__}")
        names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
        if len(names) > LIGHT_QUEUES_MAX:
            raise MessageIllegalError(f"a message may be in {LIGHT_QUEUES_MAX} light queues, not in {len(names)}")
        for name in names:
            light_queue(name)
        force_setattr(self, "light_queues", names)

    def _check_delay(self) -> None:
        level, deliver_at_ms = self.delay_level, self.deliver_at_ms
        level = _checked_number("delay_level", level)
        force_setattr(self, "delay_level", level)
        if deliver_at_ms is None:
            return
        if level:
            raise MessageIllegalError("a message has a delay_level or a deliver_at_ms, not both")
        deliver_at_ms = _checked_number("deliver_at_ms", deliver_at_ms)
        force_setattr(self, "deliver_at_ms", deliver_at_ms)
        ahead_ms = deliver_at_ms - time.time_ns() // 1_000_000
        if ahead_ms > TIMER_DELAY_MAX_MS:
            days = ahead_ms / 86_400_000
            raise MessageIllegalError(
                f"deliver_at_ms {deliver_at_ms} is {days:.1f} days ahead; at most {TIMER_DELAY_MAX_MS // 86_400_000} "
                "are allowed (is it in milliseconds?)"
            )


class SystemMessage(Message, frozen=True, gc=False):
    """A message that raymq itself sends: it may have reserved properties, and go to a topic of the server."""

    def _check_properties(self) -> None:
        for name, value in self.properties.items():
            _check_text("a property name", name)
            _check_text(f"the value of property {name!r}", value)


class MessageSource(Protocol):
    """Messages whose fields are decoded when they are asked for. It has a method per field of MessageExt, with the
    field's name, which takes the message's index; these two are called most."""

    def body(self, index: int) -> bytes:
        """The body of message `index`, decompressed. BodyUnreadableError if it cannot be read."""

    def body_error(self, index: int) -> BodyUnreadableError | None:
        """The error that `body` raises for message `index`; None if the body can be read."""

    def body_prefix(self, index: int, max_bytes: int) -> bytes:
        """The first `max_bytes` bytes of the body of message `index`. BodyUnreadableError if they cannot be read."""

    def queue_offset(self, index: int) -> int:
        """The queue offset of message `index`."""


@dataclass(frozen=True, init=False)
class _MessageFields:
    """The fields of a MessageExt; how they are compared, shown, copied and replaced."""

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
    """Makes a MessageExt of the values of all its fields when it is called, and matches it by them."""

    @property
    def __match_args__(self) -> tuple[str, ...]:  # type: ignore[override]  # msgspec's stub calls it writable
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
    """A message's source, and its number there. The garbage collector does not count it: else every few polls of
    thousands of messages would have it look through all that the program has."""

    _source: MessageSource
    _index: int


class MessageExt(_MessageFields, _MessagePlace, metaclass=_MessageType, eq=False, gc=False):  # type: ignore[misc]  # frozen below
    """A message as a consumer gets it.

    `queue_offset` counts messages in the queue from 0, `physical_offset` bytes in the broker group's commit log.
    Timestamps are milliseconds since 1970: `born` by the producer's clock, `store` by the store's. `message_id` is the
    producer's unique id and stays the same over retries; `offset_message_id` names this one record.

    A message that a poll returned refers to the bytes that the poll read, its body's CRC checked, and decodes a field
    each time it is asked for. On the storage actor's node these bytes are the mapped commit log; elsewhere one fetch of
    up to 8 MiB. They stay in memory, or a deleted file on the disk, for as long as one of the poll's messages is kept.
    A program that keeps messages for long keeps `copy.copy(message)`, which refers to nothing; pickling does the same.

    A damaged message is handed over in its place, too: reading its `body` raises BodyUnreadableError, and `body_error`
    holds that error. A compressed body is decompressed when it is read, to the largest `max_message_size_bytes` of
    the stores that the process reads, at least 4 MiB. If the record itself is
    damaged (`body_error.record_damaged`), only topic, broker name, queue id, queue offset and physical offset are
    known. Text fields are empty then, and numbers are 0.
    """

    @staticmethod
    def decoded(values: tuple[Any, ...]) -> MessageExt:
        """The message with these values of all fields, in their order; what `MessageExt(*values)` makes, but sooner."""
        return _make_message(_DecodedMessage(values), 0)

    @staticmethod
    def of_source(source: MessageSource, indices: Iterable[int]) -> list[MessageExt]:
        """The messages of a source at these indices."""
        # Without a line of Python per message: a poll makes thousands.
        return list(map(_make_message, repeat(source), indices))

    @staticmethod
    def damaged(error: BodyUnreadableError, queue: MessageQueue) -> MessageExt:
        """The message of a damaged record of `queue`, of which only the place is known."""
        place = (queue.broker_name, queue.queue_id, error.queue_offset, error.physical_offset)
        return MessageExt.decoded((queue.topic, error, None, (), {}, 0, *place, 0, 0, "", "", "", "", 0, 0, {}))

    @property
    def body_error(self) -> BodyUnreadableError | None:
        """The error that reading `body` raises; None for a message whose body can be read.

        For a compressed body the first look decompresses the body.
        """
        error: BodyUnreadableError | None = self._source.body_error(self._index)
        return error

    @property
    def record_damaged(self) -> bool:
        """True if the record itself is damaged: nothing of the message is known but its place. Reads no body."""
        return not self.offset_message_id

    def _body_prefix(self, max_bytes: int) -> bytes:
        """The first `max_bytes` bytes of `body`, without decompressing the rest; for rooms of raymq that show a part.

        BodyUnreadableError if these bytes cannot be read. Damage in the compressed bytes behind them is not noticed.
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
        """This message as one of another queue; for rooms of raymq that know where it was sent."""
        return self._replaced(topic=topic, queue_id=queue_id)

    def _replaced(self, **changes: Any) -> MessageExt:
        """This message with other values of some fields; dataclasses.replace cannot copy an unreadable body."""
        values = zip(_FIELDS, self._values(), strict=True)
        return MessageExt.decoded(tuple([changes.get(name, value) for name, value in values]))

    def _values(self) -> tuple[Any, ...]:
        """The values of all fields; an unreadable body's value is its error."""
        error = self.body_error
        return tuple([getattr(self, name) if error is None or name != "body" else error for name in _FIELDS])

    @property
    def queue(self) -> MessageQueue:
        """The queue that the message is in."""
        return MessageQueue(self.topic, self.broker_name, self.queue_id)

    @property
    def light_queues(self) -> tuple[str, ...]:
        """The names of the light queues that the message was sent to, too. One that was read from a light queue has
        that queue's topic and offset; `sent_to` is where it was sent."""
        names = self.system_properties.get(PROPERTY_INNER_MULTI_DISPATCH, "").split(",")
        return tuple(name.removeprefix(LMQ_PREFIX) for name in names if name)

    @property
    def sent_to(self) -> str:
        """The topic that the message was sent to: of one that was read from a light queue another one than `topic`."""
        return self.system_properties.get(PROPERTY_REAL_TOPIC, self.topic) if is_light_queue(self.topic) else self.topic


_make_message: Final[Callable[[Any, int], MessageExt]] = partial(StructMeta.__call__, MessageExt)
"""Makes a message of its source and its number there."""
_FIELDS: Final[tuple[str, ...]] = _MessageFields.__match_args__
_BODY: Final = _FIELDS.index("body")


class _DecodedMessage:
    """The source of one message whose fields are all decoded."""

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
    if name == "body":  # read of every message: without a look-up by name
        return property(lambda self: self._source.body(self._index))
    return property(lambda self: getattr(self._source, name)(self._index))


for _number, _name in enumerate(_FIELDS):
    # Behind the decorator's back: as class attributes in the class itself they would be the fields' default values.
    if _name != "body":
        setattr(_DecodedMessage, _name, _read_value(_number))
    setattr(_MessageFields, _name, _read_field(_name))


@dataclass(frozen=True, slots=True, order=True)
class MessageQueue:
    """One queue of a topic. Queues sort by topic, then broker name, then queue id (spec/messaging.md, vocabulary)."""

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}@{self.broker_name}:{self.queue_id}"


def checked_queue(name: str, queue: object) -> MessageQueue:
    """The argument `name`, if it is a MessageQueue whose id may be a queue's. Ids of numpy become plain ints.
    InvalidArgumentError."""
    if not isinstance(queue, MessageQueue):
        raise InvalidArgumentError(f"{name}: expected a raymq.MessageQueue, not {queue!r}")
    if type(queue.queue_id) is int and 0 <= queue.queue_id <= INT32_MAX:
        return queue
    return replace(queue, queue_id=whole_number(f"{name}: queue_id", queue.queue_id, 0, INT32_MAX))


class SendStatus(Enum):
    """The durability of an acknowledged message. In all four states it is stored (spec/messaging.md §2.6)."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


class SendResult(Struct, frozen=True, gc=False):
    """The queue and offset of a message that was sent. `message_id` is its unique id, `offset_message_id` names its
    record. `recall_handle` recalls a message that waits for its `deliver_at_ms` (`Producer.recall`); None for
    others."""

    status: SendStatus
    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    recall_handle: str | None = None


class PullStatus(Enum):
    """The outcome of a read. Values as RocketMQ's client names them."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


@dataclass(frozen=True, slots=True)
class PullResult:
    """One read of one queue. Go on at `next_offset`; `max_offset` is the offset the next message will get."""

    status: PullStatus
    messages: tuple[MessageExt, ...]
    next_offset: int
    min_offset: int
    max_offset: int


class ConsumeStatus(IntEnum):
    """A listener's answer; None means CONSUME_SUCCESS, an exception RECONSUME_LATER. A plain number is no answer."""

    CONSUME_SUCCESS = 0
    RECONSUME_LATER = 1


class MessageModel(Enum):
    """CLUSTERING shares a topic's queues among a group's members; BROADCASTING gives each member all of them."""

    CLUSTERING = "CLUSTERING"
    BROADCASTING = "BROADCASTING"


class ConsumeFromWhere(Enum):
    """The start of a group that has no committed offset (spec/messaging.md §5.4)."""

    CONSUME_FROM_LAST_OFFSET = "CONSUME_FROM_LAST_OFFSET"
    CONSUME_FROM_FIRST_OFFSET = "CONSUME_FROM_FIRST_OFFSET"
    CONSUME_FROM_TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


def message_list(messages: Iterable[Message]) -> list[Message]:
    """`messages` as a list of Message, or MessageIllegalError naming the first that is not one."""
    result = list(messages)
    if any(kind is not Message for kind in set(map(type, result))):
        for message in result:
            if not isinstance(message, Message):
                raise MessageIllegalError(f"expected a raymq.Message, got {type(message).__name__}")
    return result
