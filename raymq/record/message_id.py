"""Message ids (spec/storage.md §1 "Ids").

Two kinds, both upper-case hex. The *unique id* (property UNIQ_KEY) is made by the producer, once per message, and
stays through retries: IP 4/16 bytes, process id 2, a random number 4 (Java: the class loader's hash), milliseconds
since local midnight of the first of the month 4, counter 2. The *offset message id* names a record on disk: store IP
4/16, port 4, physical offset 8. Each has 32 digits with an IPv4 address and 56 with an IPv6 one.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from datetime import datetime
from ipaddress import ip_address
from typing import Final, NamedTuple

from raymq.errors import InvalidArgumentError
from raymq.record.layout import encode_host

IDS_PER_MS: Final = 1 << 16
"""The counter has two bytes: more ids of one millisecond would not differ."""


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class UniqueIdGenerator:
    """Makes unique ids for one producer. Thread-safe; a forked child makes ids of its own.

    Time never runs backwards inside a generator: while the clock is behind, or more than 65536 ids are asked for in one
    millisecond, the last time used goes on (and ahead). Nothing survives the process: the next one draws a new random
    number.
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
        self._now_ms = 0
        self._month_start_ms = self._next_month_ms = 0
        self._counter = 0
        self._made_in_ms = 0
        self._start_process()

    def _start_process(self) -> None:
        self._process_id = os.getpid()
        pid = self._process_id if self._fixed_pid is None else self._fixed_pid
        loader = secrets.randbits(32) if self._fixed_loader is None else self._fixed_loader
        self._prefix = f"{self._address}{pid & 0xFFFF:04X}{loader & 0xFFFFFFFF:08X}"

    def next(self) -> str:
        """One unique id."""
        return self.next_batch(1)[0]

    def next_batch(self, count: int) -> list[str]:
        """`count` unique ids, in ascending order of their making."""
        ids: list[str] = []
        with self._lock:
            if os.getpid() != self._process_id:
                self._start_process()
            while len(ids) < count:
                ids += self._ids_of_one_ms(count - len(ids))
        return ids

    def _ids_of_one_ms(self, wanted: int) -> list[str]:
        """Up to `wanted` ids that share one millisecond."""
        now_ms = self._clock_ms()
        if now_ms > self._now_ms:
            self._now_ms, self._made_in_ms = now_ms, 0
        elif self._made_in_ms == IDS_PER_MS:
            self._now_ms, self._made_in_ms = self._now_ms + 1, 0
        if self._now_ms >= self._next_month_ms:
            self._month_start_ms, self._next_month_ms = _month_bounds_ms(self._now_ms)
        wanted = min(wanted, IDS_PER_MS - self._made_in_ms)
        self._made_in_ms += wanted
        first = self._counter
        self._counter = (first + wanted) & 0xFFFF
        stem = f"{self._prefix}{max(self._now_ms - self._month_start_ms, 0) & 0xFFFFFFFF:08X}"
        return [f"{stem}{number & 0xFFFF:04X}" for number in range(first, first + wanted)]


def _month_bounds_ms(now_ms: int) -> tuple[int, int]:
    """Local midnight of the first day of `now_ms`'s month, and of the next."""
    first = datetime.fromtimestamp(now_ms / 1000).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return int(first.timestamp() * 1000), int(following.timestamp() * 1000)


class OffsetMessageId(NamedTuple):
    """The parts of an offset message id: the store's address and the record's offset in its commit log."""

    host: str
    port: int
    physical_offset: int


def offset_message_id(host: str, port: int, physical_offset: int) -> str:
    """The offset message id of the record at byte `physical_offset` of the store at `host`, an IP address. 32 or 56
    hex digits. InvalidArgumentError when `host` is no IP address or a number is out of range."""
    if not 0 <= physical_offset < 1 << 63:
        raise InvalidArgumentError(f"a physical offset of {physical_offset} is out of range")
    return f"{encode_host(host, port).hex().upper()}{physical_offset:016X}"


def parse_offset_message_id(text: str) -> OffsetMessageId:
    """The opposite of `offset_message_id`. InvalidArgumentError when `text` is not such an id."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    if len(data) * 2 != len(text) or len(data) not in (16, 28):
        raise InvalidArgumentError(f"{text!r} is not an offset message id: expected 32 or 56 hexadecimal digits")
    address, port, physical_offset = data[:-12], data[-12:-8], data[-8:]
    return OffsetMessageId(
        str(ip_address(address)), int.from_bytes(port, signed=True), int.from_bytes(physical_offset, signed=True)
    )
