"""Trace records are the lines that RocketMQ writes about sends, deliveries and transactions (spec/features.md §6.1).

A trace message's body is text. A field and the next are parted by \\x01, a record is ended by \\x02. The first field
names the type; shown here with ``^`` and ``$``:

    Pub^time^region^group^topic^msgId^tags^keys^storeHost^bodyLength^cost^msgType^offsetMsgId^success$
    SubBefore^time^region^group^requestId^msgId^retryTimes^keys$            one per message of a listener call
    SubAfter^requestId^msgId^cost^success^keys^contextCode^time^group$      one per message; requestId joins the two
    EndTransaction^time^region^group^topic^msgId^tags^keys^storeHost^msgType^transactionId^state^fromCheck$
    Recall^time^region^group^topic^msgId^success$

Tags or keys that a message does not have are the text ``null``. Older writers leave fields out at the end, and newer
ones add some: the reader takes every length that RocketMQ's takes, and, other than RocketMQ's, an empty last field.

Nothing here has state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

FIELD_END: Final = "\x01"
RECORD_END: Final = "\x02"
ABSENT: Final = "null"
"""The text in a trace record for a message without tags or without keys."""
_NO_SEPARATORS: Final = {ord(FIELD_END): " ", ord(RECORD_END): " "}


class TracedType(IntEnum):
    """The type of a traced message, with its number in trace records."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3
    ORDER = 4


class ContextCode(IntEnum):
    """The outcome of a listener call, with its number in trace records."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    RETURNED_NULL = 3
    FAILED = 4


@dataclass(frozen=True, slots=True)
class Pub:
    """A trace record of a send to which the store answered.

    `time_ms`: the beginning of the send, in ms since 1970. `tags`, `keys`: the message's tags and keys, keys separated
    by spaces; None if the message has none. `store_host`: ``"address:port"`` of the store. `body_length`: the body's
    length in bytes. `cost_ms`: the send's time divided by the number of messages sent together. `success`: the store
    answered SEND_OK. `client_host`: only in records of newer RocketMQ clients.
    """

    time_ms: int
    region: str
    group: str
    topic: str
    message_id: str
    tags: str | None
    keys: str | None
    store_host: str
    body_length: int
    cost_ms: int
    message_type: TracedType = TracedType.NORMAL
    offset_message_id: str = ""
    success: bool = True
    client_host: str = ""


@dataclass(frozen=True, slots=True)
class SubBefore:
    """A trace record of a message that is about to be passed to a listener. `retry_times`: number of earlier
    deliveries."""

    time_ms: int
    region: str
    group: str
    request_id: str
    message_id: str
    retry_times: int
    keys: str | None


@dataclass(frozen=True, slots=True)
class SubAfter:
    """A trace record of a message after the listener's call with this message. `cost_ms`: the call's time divided by
    its number of messages. Some records lack `time_ms` and `group`."""

    request_id: str
    message_id: str
    cost_ms: int
    success: bool
    keys: str | None
    code: ContextCode = ContextCode.SUCCESS
    time_ms: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class EndTransaction:
    """A trace record of the end of a transaction (half message). `state`: RocketMQ's name of the outcome, such as
    ``COMMIT_MESSAGE``. `from_check`: True if the producer answered a broker's check."""

    time_ms: int
    region: str
    group: str
    topic: str
    message_id: str
    tags: str | None
    keys: str | None
    store_host: str
    message_type: TracedType
    transaction_id: str
    state: str
    from_check: bool


@dataclass(frozen=True, slots=True)
class Recall:
    """A trace record of a delayed message's recall. `success`: whether the message was recalled."""

    time_ms: int
    region: str
    group: str
    topic: str
    message_id: str
    success: bool


class TracedMessage(Protocol):
    """A sent message, with the fields that its trace record needs."""

    @property
    def tags(self) -> str | None: ...

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def body(self) -> bytes: ...


class TracedDelivery(NamedTuple):
    """A delivered message: its unique id, the number of earlier deliveries, and its keys, which are None if the message
    has no keys."""

    message_id: str
    retry_times: int
    keys: str | None


TraceRecord = Pub | SubBefore | SubAfter | EndTransaction | Recall


class DecodedTrace(NamedTuple):
    """The records of a trace message's body, in order, and the number of unreadable records. Records of unknown types,
    which newer versions write, are skipped and not counted."""

    records: list[TraceRecord]
    unreadable: int


def encode_records(records: Iterable[TraceRecord]) -> str:
    """Format trace records as text, one after another without a gap. A separator character inside a field becomes a
    space."""
    return "".join([FIELD_END.join(_fields(record)) + RECORD_END for record in records])


def pub_texts(
    common: Pub,
    message_ids: Iterable[str],
    messages: Iterable[TracedMessage],
    offset_ids: Iterable[str],
    types: Iterable[int],
) -> list[str]:
    """Format the Pub records of messages that were sent together. The text equals the result of `encode_records`, but
    no object is created per message. `common` has the fields that all records share. The other arguments list ids,
    messages, offset message ids and TracedTypes in the same order."""
    head = f"Pub\x01{common.time_ms}\x01{_clean(common.region)}\x01{_clean(common.group)}\x01{_clean(common.topic)}\x01"
    host, cost = common.store_host, common.cost_ms
    tail = FIELD_END + _flag(common.success) + RECORD_END
    return [
        f"{head}{message_id}\x01{_clean(message.tags)}\x01{_keys_text(message.keys)}\x01{host}\x01{len(message.body)}\x01"
        f"{cost}\x01{kind:d}\x01{offset_id}{tail}"
        for message_id, message, offset_id, kind in zip(message_ids, messages, offset_ids, types, strict=True)
    ]


def before_texts(common: SubBefore, deliveries: Iterable[TracedDelivery]) -> list[str]:
    """Format a SubBefore trace record for each message of one listener call or poll. `common` has the fields that all
    records share."""
    head = FIELD_END.join(_fields(common)[:5]) + FIELD_END
    return [
        f"{head}{_clean(one.message_id)}\x01{one.retry_times}\x01{_clean(one.keys or None)}{RECORD_END}"
        for one in deliveries
    ]


def after_texts(common: SubAfter, deliveries: Iterable[tuple[TracedDelivery, ContextCode]]) -> list[str]:
    """Format a SubAfter trace record for each message of one listener call or poll, with the message's outcome.
    `common` has the fields that all records share."""
    _, request_id, _, cost, *_ = _fields(common)
    tail = f"\x01{common.time_ms}\x01{common.group}{RECORD_END}"
    return [
        f"SubAfter\x01{request_id}\x01{_clean(one.message_id)}\x01{cost}\x01{_flag(code is ContextCode.SUCCESS)}\x01"
        f"{_clean(one.keys)}\x01{code:d}{tail}"
        for one, code in deliveries
    ]


def record_keys(records: Iterable[TraceRecord]) -> set[str]:
    """Return the keys of a trace message that contains these records: the id and the keys of each traced
    message."""
    found: set[str] = set()
    for record in records:
        found.add(record.message_id)
        if not isinstance(record, Recall) and record.keys is not None:
            found.update(record.keys.split())
    found.discard("")
    return found


def decode_records(text: str) -> DecodedTrace:
    """Parse the body of a trace message. Never raises: damaged records are counted, and all other records are
    returned."""
    records: list[TraceRecord] = []
    unreadable = 0
    for line in text.split(RECORD_END):
        fields = line.split(FIELD_END)
        read = _READERS.get(fields[0])
        if read is None:
            continue
        try:
            records.append(read(fields))
        except (IndexError, ValueError):  # the trace record has too few fields, or text in place of a number
            unreadable += 1
    return DecodedTrace(records, unreadable)


def _fields(record: TraceRecord) -> Sequence[str]:
    values: Sequence[object]
    match record:
        case Pub():
            values = (
                "Pub", *_beginning(record), record.body_length, record.cost_ms, int(record.message_type),
                record.offset_message_id, _flag(record.success),
                *((record.client_host,) if record.client_host else ()),
            )  # fmt: skip
        case SubBefore():
            # The last field of a trace record must not be empty. RocketMQ's reader drops empty fields at the end of a
            # record, and then cannot read the record.
            values = (
                "SubBefore", record.time_ms, record.region, record.group, record.request_id, record.message_id,
                record.retry_times, record.keys or ABSENT,
            )  # fmt: skip
        case SubAfter():
            values = (
                "SubAfter", record.request_id, record.message_id, record.cost_ms, _flag(record.success),
                _given(record.keys), int(record.code),
                *(() if record.time_ms is None else (record.time_ms, record.group or "")),
            )  # fmt: skip
        case EndTransaction():
            values = (
                "EndTransaction", *_beginning(record), int(record.message_type), record.transaction_id,
                record.state, _flag(record.from_check),
            )  # fmt: skip
        case Recall():
            values = (
                "Recall", record.time_ms, record.region, record.group, record.topic, record.message_id,
                _flag(record.success),
            )  # fmt: skip
    return [str(value).translate(_NO_SEPARATORS) for value in values]


def _beginning(record: Pub | EndTransaction) -> Sequence[object]:
    """Return the fields with which both Pub records and EndTransaction records begin."""
    return (
        record.time_ms, record.region, record.group, record.topic, record.message_id, _given(record.tags),
        _given(record.keys), record.store_host,
    )  # fmt: skip


def _clean(text: str | None) -> str:
    return ABSENT if text is None else text.translate(_NO_SEPARATORS)


def _keys_text(keys: Sequence[str]) -> str:
    return " ".join(keys).translate(_NO_SEPARATORS) if keys else ABSENT


def _given(text: str | None) -> str:
    return ABSENT if text is None else text


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _text_or_none(text: str) -> str | None:
    return None if text == ABSENT else text


def _read_beginning(fields: Sequence[str]) -> tuple[int, str, str, str, str, str | None, str | None, str]:
    region, group, topic, message_id = fields[2:6]
    tags, keys = _text_or_none(fields[6]), _text_or_none(fields[7])
    return int(fields[1]), region, group, topic, message_id, tags, keys, fields[8]


def _read_pub(fields: Sequence[str]) -> Pub:
    count = len(fields)
    return Pub(
        *_read_beginning(fields),
        body_length=int(fields[9]),
        cost_ms=int(fields[10]),
        message_type=TracedType(int(fields[11])),
        offset_message_id=fields[12] if count >= 14 else "",
        success=count < 13 or fields[12 if count == 13 else 13] == "true",
        client_host=fields[14] if count >= 15 else "",
    )


def _read_before(fields: Sequence[str]) -> SubBefore:
    return SubBefore(
        time_ms=int(fields[1]),
        region=fields[2],
        group=fields[3],
        request_id=fields[4],
        message_id=fields[5],
        retry_times=int(fields[6]),
        keys=_text_or_none(fields[7]),
    )


def _read_after(fields: Sequence[str]) -> SubAfter:
    count = len(fields)
    return SubAfter(
        request_id=fields[1],
        message_id=fields[2],
        cost_ms=int(fields[3]),
        success=fields[4] == "true",
        keys=_text_or_none(fields[5]),
        code=ContextCode(int(fields[6])) if count >= 7 else ContextCode.SUCCESS,
        time_ms=int(fields[7]) if count >= 9 else None,
        group=fields[8] if count >= 9 else None,
    )


def _read_end(fields: Sequence[str]) -> EndTransaction:
    return EndTransaction(
        *_read_beginning(fields),
        message_type=TracedType(int(fields[9])),
        transaction_id=fields[10],
        state=fields[11],
        from_check=fields[12] == "true",
    )


def _read_recall(fields: Sequence[str]) -> Recall:
    return Recall(
        time_ms=int(fields[1]),
        region=fields[2],
        group=fields[3],
        topic=fields[4],
        message_id=fields[5],
        success=fields[6] == "true",
    )


_READERS: Final[dict[str, Callable[[Sequence[str]], TraceRecord]]] = {
    "Pub": _read_pub,
    "SubBefore": _read_before,
    "SubAfter": _read_after,
    "EndTransaction": _read_end,
    "Recall": _read_recall,
}
