"""Tests of unique message ids and of offset message ids."""

from __future__ import annotations

import os
import pickle
import threading
import time
from datetime import datetime

import pytest

from raymq.common.errors import InvalidArgumentError
from raymq.records.format.message_id import (
    IDS_PER_MS,
    IdRange,
    UniqueIdGenerator,
    offset_message_id,
    parse_offset_message_id,
)

MID_MONTH_MS = int(datetime(2024, 5, 15, 12).timestamp() * 1000)


def generator_at(*times_ms: int, ip: str = "10.0.0.1") -> UniqueIdGenerator:
    """Return a generator of unique ids. Its clock returns `times_ms` one after another, and then always the
    last time."""
    waiting = list(times_ms)
    return UniqueIdGenerator(
        ip, pid=6699, loader_hash=0x18B4AAC2, clock_ms=lambda: waiting.pop(0) if len(waiting) > 1 else waiting[0]
    )


def test_id_holds_address_pid_loader_time_and_counter() -> None:
    first = int(datetime(2024, 5, 1).timestamp() * 1000)
    generator = generator_at(first + 1_000_000_000)
    generator.next_batch(5)
    assert generator.next() == "0A0000011A2B18B4AAC23B9ACA000005"


def test_ids_of_an_ipv6_producer_have_56_digits() -> None:
    identifier = generator_at(MID_MONTH_MS, ip="::1").next()
    assert len(identifier) == 56
    assert identifier.startswith("0" * 31 + "1")


def test_consecutive_ids_differ_by_one_in_their_counter() -> None:
    ids = generator_at(MID_MONTH_MS).next_batch(100)
    counters = [int(identifier[-4:], 16) for identifier in ids]
    assert counters == list(range(100))


def test_ids_beyond_one_millisecond_continue_in_the_next() -> None:
    ids = generator_at(MID_MONTH_MS).next_batch(IDS_PER_MS + 10)
    assert len(set(ids)) == IDS_PER_MS + 10


def test_ids_stay_unique_when_the_clock_runs_backwards() -> None:
    generator = generator_at(MID_MONTH_MS, MID_MONTH_MS - 5000, MID_MONTH_MS - 4999, MID_MONTH_MS)
    ids = [identifier for _ in range(4) for identifier in generator.next_batch(IDS_PER_MS // 2)]
    assert len(set(ids)) == len(ids)


def test_a_range_has_the_ids_that_a_batch_of_ids_has() -> None:
    ids = generator_at(MID_MONTH_MS).next_range(20)
    assert ids == tuple(generator_at(MID_MONTH_MS).next_batch(20))
    assert list(ids) == [ids[index] for index in range(20)]
    assert hash(ids) == hash(tuple(ids))


def test_a_range_continues_at_zero_after_the_last_counter() -> None:
    ids = IdRange("STEM", 0xFFFE, 4)
    assert ids == ("STEMFFFE", "STEMFFFF", "STEM0000", "STEM0001")
    assert (ids[-1], ids[3]) == ("STEM0001", "STEM0001")
    assert isinstance(ids[1:3], IdRange)
    assert ids[1:3] == ("STEMFFFF", "STEM0000")
    assert ids[::2] == ("STEMFFFE", "STEM0000")
    assert (len(ids[4:]), ids[4:]) == (0, ())
    with pytest.raises(IndexError):
        ids[4]


def test_ranges_are_equal_if_their_ids_are() -> None:
    assert IdRange("A", 1, 2) == IdRange("A", 1, 2)
    assert IdRange("A", 1, 2) != IdRange("A", 1, 3)
    assert IdRange("A", 1, 2) != IdRange("B", 1, 2)
    assert IdRange("A", 1, 2) != ("A0001",)
    assert IdRange("A", 1, 2) != ["A0001", "A0002"]
    assert IdRange("A", 7, 0) == IdRange("B", 1, 0) == ()
    assert pickle.loads(pickle.dumps(IdRange("A", 1, 2))) == ("A0001", "A0002")


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (IDS_PER_MS, 1), (0, IDS_PER_MS + 1), (0, -1)])
def test_a_range_refuses_numbers_beyond_its_counter(first: int, count: int) -> None:
    with pytest.raises(InvalidArgumentError, match="two bytes"):
        IdRange("A", first, count)


def test_a_range_has_one_stem_also_where_its_millisecond_has_too_few_ids() -> None:
    generator = generator_at(MID_MONTH_MS)
    ranges = [generator.next_range(IDS_PER_MS - 5), generator.next_range(10), generator.next_range(IDS_PER_MS)]
    assert [len(ids) for ids in ranges] == [IDS_PER_MS - 5, 10, IDS_PER_MS]
    assert len({ids.stem for ids in ranges}) == 3
    assert len({identifier for ids in ranges for identifier in ids}) == sum(map(len, ranges))
    with pytest.raises(InvalidArgumentError, match="too many for one millisecond"):
        generator.next_range(IDS_PER_MS + 1)


@pytest.mark.parametrize("end", [datetime(2024, 6, 1), datetime(2025, 1, 1)])
def test_the_time_in_an_id_restarts_with_the_month(end: datetime) -> None:
    turn_ms = int(end.timestamp() * 1000)
    generator = generator_at(turn_ms - 1, turn_ms, turn_ms + 1)
    times = [int(generator.next()[-12:-4], 16) for _ in range(3)]
    assert times[1:] == [0, 1]
    assert times[0] > 27 * 86_400_000


def test_threads_get_different_ids() -> None:
    generator = UniqueIdGenerator("127.0.0.1")
    ids: list[str] = []

    def draw() -> None:
        ids.extend([identifier for _ in range(200) for identifier in generator.next_batch(7)])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 4 * 200 * 7


def test_two_generators_of_one_process_differ() -> None:
    assert UniqueIdGenerator("127.0.0.1").next()[:20] != UniqueIdGenerator("127.0.0.1").next()[:20]


def test_a_forked_child_makes_ids_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = UniqueIdGenerator("127.0.0.1", clock_ms=lambda: MID_MONTH_MS)
    before = generator.next()
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    after = generator.next()
    assert after[8:12] == f"{child & 0xFFFF:04X}"
    assert after[:20] != before[:20]


def test_the_wall_clock_is_the_default() -> None:
    midnight = datetime.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp() * 1000
    elapsed = int(UniqueIdGenerator("127.0.0.1").next()[-12:-4], 16)
    assert abs(midnight + elapsed - time.time() * 1000) < 60_000


def test_the_generator_refuses_a_host_that_is_not_an_address() -> None:
    with pytest.raises(InvalidArgumentError, match="broker-a"):
        UniqueIdGenerator("broker-a")


@pytest.mark.parametrize("host", ["127.0.0.1", "255.255.255.255", "::1", "2001:db8::17"])
@pytest.mark.parametrize("physical_offset", [0, 101, 1 << 40, (1 << 63) - 1])
def test_offset_message_id_parses_back(host: str, physical_offset: int) -> None:
    identifier = offset_message_id(host, 10911, physical_offset)
    assert parse_offset_message_id(identifier) == (host, 10911, physical_offset)
    assert parse_offset_message_id(identifier.lower()) == (host, 10911, physical_offset)


@pytest.mark.parametrize("text", ["", "7F", "Z" * 32, "0" * 31, "0" * 33, "0" * 40, " 7F00000100002A9F000000000000065"])
def test_an_invalid_offset_message_id_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="32 or 56"):
        parse_offset_message_id(text)


@pytest.mark.parametrize(("host", "offset"), [("localhost", 0), ("127.0.0.1", -1), ("127.0.0.1", 1 << 63)])
def test_offset_message_id_refuses_names_and_offsets_out_of_range(host: str, offset: int) -> None:
    with pytest.raises(InvalidArgumentError):
        offset_message_id(host, 10911, offset)
