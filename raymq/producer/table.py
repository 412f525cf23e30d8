"""`Producer.send_table`: sends the rows of an Arrow table as messages (design §4, "Columns").

Every row is checked before the first is sent, in a pass of its own; then slices of rows become messages, which wait in
the producer's buffer like any other, so that a table of any size takes bounded memory beside itself. The result has
ranges of offsets, not a result per row.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa

from raymq.errors import InvalidArgumentError, MessageIllegalError, SendUnknownError
from raymq.message import Message, MessageQueue, SendStatus
from raymq.producer.buffer_pool import BufferPool
from raymq.producer.completion import Acknowledged, BeforeEnd, Outcome
from raymq.producer.encoder import check_record_size, may_exceed_a_record
from raymq.producer.queue_selector import ANYWHERE, TURN_MAX_MESSAGES, Destination, select_queue_by_hash
from raymq.producer.settings import ProducerSettings
from raymq.protocol.route import TopicRoute

if TYPE_CHECKING:
    from raymq.producer.producer import SendRequest

TABLE_SLICE_ROWS: Final = 2048
"""Rows of a table that are in memory as messages at a time."""


@dataclass(frozen=True, slots=True)
class QueueRange:
    """`count` messages that follow each other in a queue; the first has `first_offset`."""

    queue: MessageQueue
    first_offset: int
    count: int


@dataclass(frozen=True, slots=True)
class TableResult:
    """The result of sending a table of `count` rows: the `ranges` of offsets that hold them, sorted by queue and
    offset, and in `statuses` the number of rows by status."""

    count: int
    ranges: tuple[QueueRange, ...]
    statuses: Mapping[SendStatus, int]


class SendSteps(Protocol):
    """The steps of a send, as a Producer offers them to its ways of sending."""

    @property
    def settings(self) -> ProducerSettings: ...

    @property
    def buffer(self) -> BufferPool: ...

    def check(self, messages: Sequence[Message]) -> str: ...

    def route(self, topic: str, timeout_s: float, *, keyed: bool) -> TopicRoute: ...

    def request(
        self,
        messages: Sequence[Message],
        destination: Destination,
        timeout_s: float,
        *,
        together: bool = False,
        before_end: BeforeEnd | None = None,
    ) -> SendRequest: ...

    def hand_over(self, route: TopicRoute, request: SendRequest) -> object: ...


def send_table(producer: SendSteps, topic: str, table: pa.Table | pa.RecordBatch) -> TableResult:
    """Send each row of `table` as a message, and wait until all are stored (`Producer.send_table`)."""
    rows = _Rows(topic, table)
    for first in range(0, rows.count, TABLE_SLICE_ROWS):
        rows.check(first, producer)
    progress = _TableProgress(rows.count)
    try:
        for first in range(0, rows.count, TABLE_SLICE_ROWS):
            if progress.failure is not None:
                break
            route = producer.route(topic, producer.settings.send_timeout_s, keyed=rows.keyed)
            for messages, destination in _split_by_queue(route, *rows.read(first)):
                _hand_over(producer, route, messages, destination, progress)
    except Exception as error:  # also a hook's; `result` raises it when the rows under way have their end
        progress.stop(error)
    return progress.result()


def _hand_over(
    producer: SendSteps, route: TopicRoute, messages: list[Message], destination: Destination, progress: _TableProgress
) -> None:
    producer.check(messages)
    timeout_s = producer.settings.send_timeout_s
    request = producer.request(messages, destination, timeout_s, before_end=progress.ended)
    # A table is sent as fast as space becomes free, so it waits for that even where `when_full` is "raise".
    request.generation = producer.buffer.allocate(request.cost_bytes, len(messages), timeout_s)
    progress.handed_over(len(messages))
    try:
        producer.hand_over(route, request)
    except BaseException:
        progress.not_taken(len(messages))
        raise


def _split_by_queue(
    route: TopicRoute, messages: list[Message], keys: list[Any] | None
) -> Iterator[tuple[list[Message], Destination]]:
    """The messages in parts that go to one queue each: those with a key by its hash, in their order; the others in
    parts as long as a queue's turn."""
    free = messages
    if keys is not None:
        queues = route.require_all_queues()
        free = [message for message, key in zip(messages, keys, strict=True) if key is None]
        by_queue: dict[MessageQueue, list[Message]] = {}
        for message, key in zip(messages, keys, strict=True):
            if key is not None:
                by_queue.setdefault(select_queue_by_hash(queues, message, key), []).append(message)
        for queue, group in by_queue.items():
            yield group, Destination(queue=queue)
    for first in range(0, len(free), TURN_MAX_MESSAGES):
        yield free[first : first + TURN_MAX_MESSAGES], ANYWHERE


class _Rows:
    """A table that is read in slices. InvalidArgumentError when its columns cannot be sent."""

    def __init__(self, topic: str, table: pa.Table | pa.RecordBatch) -> None:
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table):
            raise InvalidArgumentError(f"send_table takes a pyarrow Table or RecordBatch, not {type(table).__name__}")
        _check_columns(table.schema)
        self.topic = topic
        self.count = table.num_rows
        self._table = table
        self.keyed = "sharding_key" in table.column_names

    def read(self, first: int) -> tuple[list[Message], list[Any] | None]:
        """The messages of the slice that starts at row `first`, and their sharding keys if there are some."""
        part = self._table.slice(first, TABLE_SLICE_ROWS)
        columns = {name: part[name].to_pylist() for name in part.column_names}
        keys = columns.pop("sharding_key", None)
        return [self._message(first + index, values) for index, values in enumerate(_by_row(columns))], keys

    def check(self, first: int, producer: SendSteps) -> None:
        """Check the slice that starts at row `first`. MessageIllegalError when one of its rows cannot be sent."""
        messages, _ = self.read(first)
        if messages:
            producer.check(messages)
        for index, message in enumerate(messages):
            if may_exceed_a_record(message):
                try:
                    check_record_size(message)
                except MessageIllegalError as error:
                    raise MessageIllegalError(f"row {first + index}: {error}; no row was sent") from None

    def _message(self, row: int, values: dict[str, Any]) -> Message:
        body = values["body"]
        if body is None:
            raise MessageIllegalError(f"row {row}: the body is null; no row was sent")
        try:
            return Message(
                self.topic,
                body if isinstance(body, bytes) else body.encode(),
                values.get("tags"),
                values.get("keys") or (),
                _as_dict(values.get("properties")),
            )
        except MessageIllegalError as error:
            raise MessageIllegalError(f"row {row}: {error}; no row was sent") from None


def _by_row(columns: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of columns, each as a dict from column to value."""
    names = tuple(columns)
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(names, values, strict=True))


def _as_dict(pairs: Sequence[tuple[str, str]] | None) -> dict[str, str]:
    """A value of an Arrow map column as a dict; MessageIllegalError when a key is there twice."""
    if not pairs:
        return {}
    properties = dict(pairs)
    if len(properties) < len(pairs):
        raise MessageIllegalError("a property is there twice")
    return properties


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list_of_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(kind.value_type)


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _is_text_map(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind)) and _is_text(kind.key_type) and _is_text(kind.item_type)


_KINDS: Final[dict[str, tuple[Callable[[pa.DataType], bool], str]]] = {
    "body": (lambda kind: _is_bytes(kind) or _is_text(kind), "binary or string"),
    "tags": (_is_text, "string"),
    "keys": (lambda kind: _is_text(kind) or _is_list_of_text(kind), "string or list of strings"),
    "properties": (_is_text_map, "map of string to string"),
    "sharding_key": (lambda kind: _is_text(kind) or bool(pa.types.is_signed_integer(kind)), "string or signed integer"),
}


def _check_columns(schema: pa.Schema) -> None:
    """Check a table's columns. The InvalidArgumentError names everything that is wrong with them."""
    wrong = [f"column {name!r} is unknown" for name in schema.names if name not in _KINDS]
    wrong += [f"column {name!r} is there twice" for name, count in Counter(schema.names).items() if count > 1]
    wrong += [] if "body" in schema.names else ["column 'body' is missing"]
    for field in schema:
        if field.name in _KINDS and not pa.types.is_null(field.type):
            fits, expected = _KINDS[field.name]
            if not fits(field.type):
                wrong.append(f"column {field.name!r} is {field.type}, not {expected}")
    if wrong:
        raise InvalidArgumentError(f"this table cannot be sent: {'; '.join(wrong)} (columns: {', '.join(_KINDS)})")


class _TableProgress:
    """The results of a table's rows so far. Thread-safe: several senders end rows."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._changed = threading.Condition()
        self._under_way = 0
        self._count = 0
        self._ranges: dict[MessageQueue, list[list[int]]] = {}  # [first offset, offset after the last]
        self._statuses: Counter[SendStatus] = Counter()
        self.failure: BaseException | None = None

    def handed_over(self, count: int) -> None:
        with self._changed:
            self._under_way += count

    def ended(self, first: int, end: int, outcome: Outcome) -> None:
        """Note the end of `end` - `first` rows."""
        with self._changed:
            if isinstance(outcome, Acknowledged):
                self._acknowledged(outcome)
            elif self.failure is None or isinstance(outcome, SendUnknownError):
                self.failure = outcome  # of all errors, the one that says that rows may be stored matters most
            self._end(end - first)

    def not_taken(self, count: int) -> None:
        """Note that rows were not handed over after all."""
        with self._changed:
            self._end(count)

    def _acknowledged(self, rows: Acknowledged) -> None:
        self._count += len(rows.queue_offsets)
        self._statuses[rows.status] += len(rows.queue_offsets)
        ranges = self._ranges.setdefault(rows.queue, [])
        for first, end in _runs(rows.queue_offsets):
            if ranges and ranges[-1][1] == first:
                ranges[-1][1] = end
            else:
                ranges.append([first, end])

    def stop(self, error: BaseException) -> None:
        """Note `error`, because of which no more rows are handed over, unless a row failed before."""
        with self._changed:
            self.failure = self.failure or error

    def result(self) -> TableResult:
        """Wait for all rows under way, each of which has its end in time; raise the first failure."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
        if self.failure is not None:
            self.failure.add_note(f"{self._count} of the table's {self._rows} rows were acknowledged")
            raise self.failure
        ranges = [
            QueueRange(queue, first, end - first)
            for queue in sorted(self._ranges)
            for first, end in sorted(self._ranges[queue])
        ]
        return TableResult(self._count, tuple(ranges), dict(self._statuses))

    def _end(self, count: int) -> None:
        self._under_way -= count
        if not self._under_way:
            self._changed.notify_all()


def _runs(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The offsets as ranges [first, end)."""
    if isinstance(offsets, range):
        yield offsets.start, offsets.stop
        return
    for offset in offsets:
        yield offset, offset + 1
