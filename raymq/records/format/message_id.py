"""Message ids (spec/storage.md §1 "Ids").

There are two kinds of ids, both upper-case hex. The *unique id* (property UNIQ_KEY) is created once per message by the
producer, and retries do not change it. It begins with an IP address of 4 or 16 bytes, a process id of 2 bytes, and a
random number of 4 bytes (in Java the class loader's hash). The milliseconds since local midnight of the first of the
month (4 bytes) and a counter of 2 bytes follow. The *offset message id* identifies a record on disk. It consists of the
store's IP address of 4 or 16 bytes, a port of 4 bytes, and a physical offset of 8 bytes. Each id has 32 digits with an
IPv4 address and 56 digits with an IPv6 address.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from ipaddress import ip_address
from typing import Final, NamedTuple, overload

from raymq.common.errors import InvalidArgumentError, MessageIllegalError
from raymq.records.format.layout import encode_host

IDS_PER_MS: Final = 1 << 16
"""Maximum number of unique ids per millisecond. The counter has two bytes, so more ids of the same millisecond would
repeat earlier ids."""


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class IdRange(Sequence[str]):
    """A range of consecutive unique ids. The text of an id is created when it is read. Id i is `stem` followed by the
    four upper-case hex digits of `(first + i) & 0xffff`. `len` returns the number of ids.

    A range equals another range or a tuple if both have the same ids. Immutable. Raises InvalidArgumentError unless
    `first` is in 0 to 65535 and `count` in 0 to 65536, so that all ids differ.
    """

    __slots__ = ("_count", "first", "stem")

    def __init__(self, stem: str, first: int, count: int) -> None:
        if not (0 <= first < IDS_PER_MS and 0 <= count <= IDS_PER_MS):
            raise InvalidArgumentError(
                f"{count} ids from {first} on exceed the range of the counter, which has two bytes"
            )
        self.stem: Final = stem
        self.first: Final = first
        self._count: Final = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        """Return the id at `index`. A slice with step 1 returns an IdRange; any other slice returns a tuple."""
        numbers = range(self._count)[index]
        if isinstance(numbers, int):
            return self._id(numbers)
        if numbers.step == 1:
            return IdRange(self.stem, (self.first + numbers.start) & 0xFFFF, len(numbers))
        return tuple(map(self._id, numbers))

    def __iter__(self) -> Iterator[str]:
        return map(self._id, range(self._count))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, IdRange):
            same = (self._count, self.stem, self.first) == (other._count, other.stem, other.first)
            return same or (len(self) == len(other) and tuple(self) == tuple(other))
        if isinstance(other, tuple):
            return len(self) == len(other) and tuple(self) == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"IdRange({self.stem!r}, {self.first}, {self._count})"

    def __reduce__(self) -> tuple[type[IdRange], tuple[str, int, int]]:
        return IdRange, (self.stem, self.first, self._count)

    def _id(self, number: int) -> str:
        return f"{self.stem}{(self.first + number) & 0xFFFF:04X}"


class UniqueIdGenerator:
    """Creates unique ids for one producer. Thread-safe. A forked child process creates different ids.

    Time never runs backwards inside a generator. If the clock is set back, the generator keeps its last used
    millisecond. If more than 65536 ids are requested in one millisecond, the generator continues with the next
    millisecond, so it may be ahead of the clock. The state is lost when the process ends; the next process uses a new
    random number.
    """

    def __init__(
        self,
        ip: str,
        *,
        pid: int | None = None,
        loader_hash: int | None = None,
        clock_ms: Callable[[], int] = _wall_clock_ms,
    ) -> None:
        self._address = encode_host(ip, 0)[:-4].hex().upper()
        self._fixed_pid, self._fixed_loader = pid, loader_hash
        self._clock_ms = clock_ms
        self._lock = threading.Lock()
        self._now_ms = -1
        self._month_start_ms = self._next_month_ms = 0
        self._counter = 0
        self._made_in_ms = 0
        self._stem = ""
        """The common prefix of all unique ids that this generator creates in the current millisecond."""
        self._start_process()

    def _start_process(self) -> None:
        self._process_id = os.getpid()
        pid = self._process_id if self._fixed_pid is None else self._fixed_pid
        loader = secrets.randbits(32) if self._fixed_loader is None else self._fixed_loader
        self._prefix = f"{self._address}{pid & 0xFFFF:04X}{loader & 0xFFFFFFFF:08X}"
        if self._now_ms >= 0:
            self._begin_ms(self._now_ms)

    def next(self) -> str:
        """Return a new unique id for one message."""
        return self.next_batch(1)[0]

    def next_batch(self, count: int) -> list[str]:
        """Return `count` unique ids, in the order of their creation."""
        ids: list[str] = []
        with self._lock:
            while len(ids) < count:
                ids += self._ids_of_one_ms(count - len(ids))
        return ids

    def next_range(self, count: int) -> IdRange:
        """Return `count` unique ids that share one millisecond. Raises InvalidArgumentError if `count` is more than
        65536.

        If fewer than `count` ids are left in the current millisecond, all returned ids belong to the next millisecond.
        """
        if not 0 <= count <= IDS_PER_MS:
            raise InvalidArgumentError(
                f"{count} ids are too many for one millisecond; at most {IDS_PER_MS} are possible"
            )
        with self._lock:
            return self._ids_of_one_ms(count, all_of_them=True)

    def next_parts(self) -> tuple[str, int]:
        """Return one unique id as a pair: its stem (the part before the last four hex digits) and its counter (these
        digits). They are the `stem` and `first` of an IdRange with this id."""
        with self._lock:
            return self._take(1, all_of_them=True)[:2]

    def _ids_of_one_ms(self, wanted: int, *, all_of_them: bool = False) -> IdRange:
        """Return up to `wanted` unique ids that share one millisecond. With `all_of_them`, returns exactly `wanted`
        ids. `wanted` must not exceed the number of ids of one millisecond."""
        return IdRange(*self._take(wanted, all_of_them=all_of_them))

    def _take(self, wanted: int, *, all_of_them: bool) -> tuple[str, int, int]:
        """Reserve up to `wanted` unique ids that share one millisecond. If `all_of_them` is True, reserve exactly
        `wanted` ids. Returns the ids' common stem, the counter value of the first id, and the number of ids."""
        if os.getpid() != self._process_id:
            self._start_process()
        now_ms = self._clock_ms()
        if now_ms > self._now_ms:
            self._begin_ms(now_ms)
        elif self._made_in_ms + (wanted if all_of_them else 1) > IDS_PER_MS:
            self._begin_ms(self._now_ms + 1)
        wanted = min(wanted, IDS_PER_MS - self._made_in_ms)
        self._made_in_ms += wanted
        first = self._counter
        self._counter = (first + wanted) & 0xFFFF
        return self._stem, first, wanted

    def _begin_ms(self, now_ms: int) -> None:
        if now_ms >= self._next_month_ms:
            self._month_start_ms, self._next_month_ms = _month_bounds_ms(now_ms)
        stem = f"{self._prefix}{max(now_ms - self._month_start_ms, 0) & 0xFFFFFFFF:08X}"
        # Set all attributes that depend on the current millisecond in one statement. Otherwise a signal handler could
        # run after only some of them are set, and then make wrong ids.
        self._stem, self._now_ms, self._made_in_ms = stem, now_ms, 0


def _month_bounds_ms(now_ms: int) -> tuple[int, int]:
    """Return two times in ms since 1970: local midnight of the first day of the month that contains `now_ms`, and local
    midnight of the first day of the next month."""
    first = datetime.fromtimestamp(now_ms / 1000).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return int(first.timestamp() * 1000), int(following.timestamp() * 1000)


class OffsetMessageId(NamedTuple):
    """A decoded offset message id: the store's address and the record's offset in the store's commit log."""

    host: str
    port: int
    physical_offset: int


def offset_message_id(host: str, port: int, physical_offset: int) -> str:
    """Return the offset message id, 32 or 56 hex digits, of a record. `host`: the store's IP address.
    `physical_offset`: the record's position in the store's log. Raises InvalidArgumentError if `host` is not an IP
    address or a number is out of range."""
    if not 0 <= physical_offset < 1 << 63:
        raise InvalidArgumentError(f"physical offset {physical_offset} is out of range")
    return f"{encode_host(host, port).hex().upper()}{physical_offset:016X}"


def parse_offset_message_id(text: str) -> OffsetMessageId:
    """Parse an offset message id. Raises InvalidArgumentError if `text` is not an offset message id."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) * 2 != len(text) or len(data) not in (16, 28):
        raise InvalidArgumentError(f"{text!r} is not an offset message id: write 32 or 56 hexadecimal digits")
    address, port, physical_offset = data[:-12], data[-12:-8], data[-8:]
    return OffsetMessageId(
        str(ip_address(address)), int.from_bytes(port, signed=True), int.from_bytes(physical_offset, signed=True)
    )


MESSAGE_ID_CHARS_MAX: Final = 64
"""Maximum length of a unique id that a program gives a message."""


def checked_message_id(message_id: str) -> str:
    """Return a unique id that a program gives a message. Raises MessageIllegalError unless it has 1 to
    MESSAGE_ID_CHARS_MAX printable ASCII characters, without spaces."""
    is_text = isinstance(message_id, str) and message_id.isascii() and message_id.isprintable()
    if not is_text or not 0 < len(message_id) <= MESSAGE_ID_CHARS_MAX or " " in message_id:
        raise MessageIllegalError(
            f"a message id has 1 to {MESSAGE_ID_CHARS_MAX} printable ASCII characters without spaces, not "
            f"{message_id!r:.100}"
        )
    return message_id
