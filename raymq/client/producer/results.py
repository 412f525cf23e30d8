"""The outcome of sends: either Acknowledged, which is the store's answer for messages of one batch, or an error.

The SendResult objects are made only when the program requests them, because a program may send millions of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Final, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from raymq.common.message import MessageQueue, SendResult, SendStatus
from raymq.common.protocol.recall import RecallHandle
from raymq.records.format.layout import encode_host
from raymq.records.format.message_id import IdRange

_HEX_PAIRS: Final = [f"{number:02X}" for number in range(256)]
_HEX_DIGITS: Final = np.frombuffer("".join(_HEX_PAIRS).encode(), np.uint16)
"""For each byte value, its two hexadecimal digits. The two digits are stored as one 16-bit number."""


class DueTimes(NamedTuple):
    """The delivery times of delayed messages of one topic, in ms since 1970, in the order of the messages."""

    topic: str
    times_ms: Sequence[int]


class Acknowledged:
    """The store's answer for consecutive messages of one batch. The messages are stored in `queue`.

    Message i has the unique id `message_ids[i]` and the queue offset `queue_offsets[i]`. Its record begins at byte
    `physical_offsets[i]` of the log. All SendResults are made when the first of them is requested.
    """

    __slots__ = (
        "_due",
        "_results",
        "_store_host",
        "message_ids",
        "physical_offsets",
        "queue",
        "queue_offsets",
        "status",
    )

    def __init__(
        self,
        status: SendStatus,
        queue: MessageQueue,
        message_ids: Sequence[str],
        queue_offsets: Sequence[int],
        physical_offsets: Sequence[int] | NDArray[np.int64],
        store_host: tuple[str, int],
        due: DueTimes | None = None,
    ) -> None:
        """Create the answer to one append. `store_host`: the store's IP address and port. `due`: the delivery times of
        the messages if `queue` is a timer queue, in which messages wait for delivery."""
        self._due = due
        self.status, self.queue = status, queue
        self.message_ids, self.queue_offsets, self.physical_offsets = message_ids, queue_offsets, physical_offsets
        self._store_host = store_host
        self._results: list[SendResult] | None = None

    def results(self) -> list[SendResult]:
        """Return a SendResult for each message, in order. Each call returns the same list; callers must not
        change it."""
        made = self._results
        if made is None:
            made = self._results = self._make()
        return made

    def _make(self) -> list[SendResult]:
        status, queue = self.status, self.queue
        if self._due is not None:
            return self._make_recallable(self._due)
        if len(self.message_ids) == 1:
            offset_id = offset_message_id(self._store_host, int(self.physical_offsets[0]))
            return [SendResult(status, self.message_ids[0], offset_id, queue, self.queue_offsets[0])]
        ids, offset_ids = _texts(self.message_ids), offset_message_ids(self._store_host, self.physical_offsets)
        # Use `map`, which runs in C, so that no line of Python runs per message: a program may send millions of
        # messages.
        return list(map(SendResult, repeat(status), ids, offset_ids, repeat(queue), self.queue_offsets))

    def _make_recallable(self, due: DueTimes) -> list[SendResult]:
        """Return a SendResult for each delayed message of this batch, with the handle by which the message can be
        recalled."""
        ids, offset_ids = _texts(self.message_ids), offset_message_ids(self._store_host, self.physical_offsets)
        name = self.queue.broker_name
        handles = [
            str(RecallHandle(due.topic, name, at_ms, message_id))
            for at_ms, message_id in zip(due.times_ms, ids, strict=True)
        ]
        results = map(SendResult, repeat(self.status), ids, offset_ids, repeat(self.queue), self.queue_offsets, handles)
        return list(results)


class SendResults(Sequence[SendResult]):
    """The results of messages that were sent together, in order. Immutable; equal to a list of the same results.

    The results are made when the first of them is read. So a program that only waits for its sends saves this work.
    """

    __slots__ = ("_acknowledged",)

    def __init__(self, acknowledged: Acknowledged) -> None:
        self._acknowledged = acknowledged

    def __len__(self) -> int:
        return len(self._acknowledged.queue_offsets)

    @overload
    def __getitem__(self, index: int) -> SendResult: ...

    @overload
    def __getitem__(self, index: slice) -> list[SendResult]: ...

    def __getitem__(self, index: int | slice) -> SendResult | list[SendResult]:
        return self._acknowledged.results()[index]

    def __iter__(self) -> Iterator[SendResult]:
        return iter(self._acknowledged.results())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, (SendResults, list)) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list's

    def __add__(self, other: Iterable[SendResult]) -> list[SendResult]:
        return [*self, *other]

    def __radd__(self, other: Iterable[SendResult]) -> list[SendResult]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type[list[SendResult]], tuple[list[SendResult]]]:
        return list, (list(self),)


@lru_cache(maxsize=256)
def _host_digits(store_host: tuple[str, int]) -> str:
    return encode_host(*store_host).hex().upper()


def offset_message_id(store_host: tuple[str, int], physical_offset: int) -> str:
    """Return the offset message id of a record (raymq.records.format.message_id). `physical_offset` is the offset of
    the record's first byte in the log of the store at `store_host`."""
    return f"{_host_digits(store_host)}{physical_offset:016X}"


def offset_message_ids(store_host: tuple[str, int], physical_offsets: Sequence[int] | NDArray[np.int64]) -> list[str]:
    """Return the offset message ids of records of one store."""
    host = encode_host(*store_host)
    rows = np.empty((len(physical_offsets), len(host) + 8), np.uint8)
    rows[:, : len(host)] = np.frombuffer(host, np.uint8)
    rows[:, len(host) :] = np.array(physical_offsets, ">i8").view(np.uint8).reshape(-1, 8)
    digits, width = _HEX_DIGITS[rows].tobytes().decode(), 2 * rows.shape[1]
    return [digits[at : at + width] for at in range(0, len(digits), width)]


def _texts(ids: Sequence[str]) -> Sequence[str]:
    """Convert unique ids to strings. If the ids are a range, they are converted 256 at a time."""
    if not isinstance(ids, IdRange) or len(ids) < 8:
        return list(ids)
    texts: list[str] = []
    number, end = ids.first, ids.first + len(ids)
    while number < end:
        until = min(end, (number | 0xFF) + 1)
        prefix = ids.stem + _HEX_PAIRS[number >> 8 & 0xFF]
        low = number & 0xFF
        texts += [prefix + pair for pair in _HEX_PAIRS[low : low + until - number]]
        number = until
    return texts


Outcome = Acknowledged | BaseException
"""The outcome of sent messages: the store's answer, or an error."""
BeforeEnd = Callable[[int, int, Outcome], None]
"""Function that is called just before a Completion sets the outcome of some of its messages. The arguments are the
index of the first message, the index after the last message, and the outcome."""
