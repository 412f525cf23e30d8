"""Tests of reading a store's log files and queue files in place, without copies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raymq.common.errors import DataLossError
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.decode import decode_records
from raymq.records.format.hashing import tags_code
from raymq.records.logfiles.file_maps import SWEEP_INTERVAL_S, FileMaps
from raymq.records.logfiles.log_reader import LogReader
from tests.support.stores.stores import LOG_FILE_BYTES, QUEUE_FILE_UNITS, make_batch, open_store

REPOSITORY = Path(__file__).resolve().parents[5]


@pytest.fixture
def root(tmp_path) -> Path:
    """Write the files of a stopped store. Two log files have 250 messages of queue 0, which alternate with messages of
    queue 1."""
    store = open_store(tmp_path / "store")
    for index in range(25):
        store.append([make_batch([b"%d" % index + b"x" * 100] * 10, tags="even" if index % 2 == 0 else "odd")])
        store.append([make_batch([b"other"], queue_id=1)])
    store.close()
    return tmp_path / "store"


@pytest.fixture
def reader(root):
    reader = LogReader(root, commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=QUEUE_FILE_UNITS * 20)
    yield reader
    reader.close()


def test_units_stop_at_a_files_end(reader):
    assert len(reader.units("orders", 0, 90, 50)) == 10
    assert len(reader.units("orders", 0, 100, 50)) == 50


def test_a_queue_that_does_not_exist_has_no_units(reader):
    assert len(reader.units("absent", 0, 0, 10)) == 0
    assert len(reader.units("orders", 0, 900, 10)) == 0
    assert len(reader.units("orders", 0, 0, 0)) == 0


def test_recovery_reads_no_more_of_a_queue_file_than_it_checks(root, reader):
    reader.units("orders", 0, 90, 1)
    assert map_flags(next((root / "consumequeue" / "orders" / "0").iterdir())) >= {"rr"}


def map_flags(path: Path) -> set[str]:
    """Return the kernel's flags of this process's memory map of a file. The flag `rr` means MADV_RANDOM."""
    is_wanted = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("VmFlags:") and is_wanted:
            return set(line.split()[1:])
        if "-" in line.split(" ", 1)[0]:
            is_wanted = line.endswith(str(path))
    raise AssertionError(f"{path} is not mapped")


def test_neighbouring_records_share_one_view(reader):
    units = reader.units("orders", 0, 0, 30)
    views = reader.views(units)
    assert [len(decode_records(view)) for view in views] == [10, 10, 10]
    assert views[0].readonly


def test_views_of_nothing_are_nothing(reader):
    assert reader.views(reader.units("orders", 0, 900, 1)) == []


def test_a_deleted_log_file_is_data_loss_and_views_taken_before_stay(reader, root):
    units = reader.units("orders", 0, 0, 10)
    [view] = reader.views(units)
    before = bytes(view)
    (root / "commitlog" / "00000000000000000000").unlink()
    with pytest.raises(DataLossError, match="was deleted"):
        reader.views(units)
    assert bytes(view) == before


def test_a_unit_that_points_outside_the_log_is_data_loss(reader):
    units = reader.units("orders", 0, 0, 1).copy()
    units["physical_offset"] = LOG_FILE_BYTES - 5
    with pytest.raises(DataLossError, match="lacks bytes"):
        reader.views(units)


def test_a_replaced_file_is_read_again(reader, root):
    path = root / "consumequeue" / "orders" / "1" / "00000000000000000000"
    assert reader.units("orders", 1, 0, 1)[0]["size"] > 0
    replacement = path.with_suffix(".new")
    replacement.write_bytes(bytes(QUEUE_FILE_UNITS * 20))
    os.replace(replacement, path)
    assert reader.units("orders", 1, 0, 1)[0]["size"] == 0


def test_another_process_reads_new_records_of_an_open_store(tmp_path):
    store = open_store(tmp_path / "store")
    reader = LogReader(
        tmp_path / "store", commit_log_file_size=LOG_FILE_BYTES, consume_queue_file_size=QUEUE_FILE_UNITS * 20
    )
    for index in range(3):
        store.append([make_batch([b"%d" % index])])
        [view] = reader.views(reader.units("orders", 0, index, 1))
        assert decode_records(view)[0].body == b"%d" % index
    reader.close()
    store.close()


def test_fetch_stops_at_max_messages_and_continues_after_them(reader):
    tags = frozenset(reader.units("orders", 0, 0, 1)["tags_code"].tolist())
    offset, bodies = 0, []
    while offset < 250:
        result = reader.fetch(FetchRequest("orders", 0, offset, 7, tags), 0, 250, 1 << 20)
        assert result.next_offset > offset
        offset = result.next_offset
        bodies += [message.body[:2].rstrip(b"x") for message in decode_records(result.records)]
    assert bodies == [b"%d" % index for index in range(0, 25, 2) for _ in range(10)]


def test_fetch_does_not_read_after_the_given_end(reader):
    result = reader.fetch(FetchRequest("orders", 0, 0, 1000), 0, 33, 1 << 20)
    assert (result.count, result.next_offset) == (33, 33)
    result = reader.fetch(FetchRequest("orders", 0, 40, 1000), 0, 33, 1 << 20)
    assert (result.status, result.next_offset) == (PullStatus.OFFSET_ILLEGAL, 33)


def found(reader: LogReader, request: FetchRequest, end: int, max_bytes: int = 1 << 30) -> tuple[list[bytes], int]:
    """Return the result of `LogReader.find`, with the records as a list of bytes."""
    parts, next_offset = reader.find(request, end, max_bytes)
    records = []
    for part in parts:
        assert len(part.starts) == len(part.sizes) == len(part.offsets) > 0
        for start, size in zip(part.starts.tolist(), part.sizes.tolist(), strict=True):
            records.append(bytes(part.data[start : start + size]))
    return records, next_offset


@pytest.mark.parametrize("tag", [None, "even", "none"])
@pytest.mark.parametrize("limits", [(1000, 1 << 30), (7, 1 << 30), (1000, 5000), (1000, 1), (1, 1)])
def test_records_found_in_place_equal_fetched_records(reader, tag, limits):
    codes = None if tag is None else frozenset({tags_code(tag)})
    offset = 3
    while offset < 250:
        request = FetchRequest("orders", 0, offset, limits[0], codes)
        result = reader.fetch(request, 0, 250, limits[1])
        records, next_offset = found(reader, request, 250, limits[1])
        assert b"".join(records) == result.records
        assert next_offset == result.next_offset > offset
        offset = next_offset


def test_a_single_record_is_found_as_it_is_among_others(reader):
    everything, _ = found(reader, FetchRequest("orders", 0, 0, 250), 250)
    for offset in range(250):
        for max_messages in (1, 64):
            [part], next_offset = reader.find(FetchRequest("orders", 0, offset, max_messages), offset + 1, 1 << 20)
            assert bytes(part.data) == everything[offset]
            assert (part.starts.tolist(), part.sizes.tolist()) == ([0], [len(everything[offset])])
            assert (part.offsets.tolist(), next_offset) == ([offset], offset + 1)


def test_a_single_record_that_is_lost_is_a_loss(reader, root):
    os.truncate(root / "commitlog" / f"{0:020d}", 30_000)
    _, lost = found(reader, FetchRequest("orders", 0, 0, 250), 250)
    with pytest.raises(DataLossError):
        reader.find(FetchRequest("orders", 0, lost, 1), lost + 1, 1 << 20)
    with pytest.raises(DataLossError, match="has no entry for offset 10000"):
        reader.find(FetchRequest("orders", 0, 10_000, 1), 10_001, 1 << 20)


def test_records_before_a_lost_one_are_found_and_then_the_loss(reader, root):
    everything, _ = found(reader, FetchRequest("orders", 0, 0, 250), 250)
    os.truncate(root / "commitlog" / f"{0:020d}", 30_000)
    records, next_offset = found(reader, FetchRequest("orders", 0, 0, 250), 250)
    assert records == everything[:next_offset]
    assert 0 < next_offset < 250
    with pytest.raises(DataLossError):
        found(reader, FetchRequest("orders", 0, next_offset, 250), 250)
    os.unlink(root / "commitlog" / f"{LOG_FILE_BYTES:020d}")
    first = next(number for number, record in enumerate(everything) if offset_in_log(record) >= LOG_FILE_BYTES)
    with pytest.raises(DataLossError):
        found(reader, FetchRequest("orders", 0, first, 250), 250)


def offset_in_log(record: bytes) -> int:
    return decode_records(record)[0].physical_offset


def test_a_unit_that_leads_to_an_extension_passes_every_tag(reader, root):
    """A consume-queue entry (unit) with an extension passes every tag filter. RocketMQ stores the extension's address
    in place of the tag code, and the address may look like any tag code."""
    path = root / "consumequeue" / "orders" / "0" / "00000000000000000000"
    data = bytearray(path.read_bytes())
    for unit, code in ((3, -(2**63) + 22), (5, -(2**31) - 1), (7, -(2**31))):
        data[unit * 20 + 12 : unit * 20 + 20] = code.to_bytes(8, signed=True)
    path.write_bytes(data)
    result = reader.fetch(FetchRequest("orders", 0, 0, 100, frozenset([tags_code("odd")])), 0, 20, 1 << 20)
    assert [message.queue_offset for message in decode_records(result.records)] == [3, 5, *range(10, 20)]


def test_fetch_from_a_queue_whose_file_is_gone_is_data_loss(reader, root):
    (root / "consumequeue" / "orders" / "0" / "00000000000000000000").unlink()
    with pytest.raises(DataLossError):
        reader.fetch(FetchRequest("orders", 0, 0, 10), 0, 250, 1 << 20)


@pytest.mark.parametrize("limits", [{"max_bytes": 1 << 30, "max_files": 3}, {"max_bytes": 300, "max_files": 99}])
def test_maps_are_bounded_and_the_least_used_go_first(tmp_path, limits):
    for index in range(6):
        (tmp_path / str(index)).write_bytes(bytes([index]) * 100)
    maps = FileMaps(**limits)
    for index in range(6):
        assert maps.get(str(tmp_path / str(index)))[0] == index
        maps.get(str(tmp_path / "0"))
    assert sorted(Path(path).name for path in maps._maps) == ["0", "4", "5"]
    maps.close()


def test_the_map_of_a_deleted_file_goes_when_another_comes_a_second_later(tmp_path):
    for name in "abcd":
        (tmp_path / name).write_bytes(b"x" * 100)
    now_s = 0.0
    maps = FileMaps(max_bytes=1 << 30, max_files=99, clock_s=lambda: now_s)
    for name in "ab":
        maps.get(str(tmp_path / name))
    (tmp_path / "a").unlink()
    now_s = SWEEP_INTERVAL_S - 0.1
    maps.get(str(tmp_path / "c"))
    assert [Path(path).name for path in maps._maps] == ["a", "b", "c"]
    now_s = SWEEP_INTERVAL_S
    maps.get(str(tmp_path / "d"))
    assert [Path(path).name for path in maps._maps] == ["b", "c", "d"]
    maps.close()


def test_the_map_of_a_deleted_file_goes_when_another_table_maps_a_file(tmp_path):
    """A consumer has mapped the log of a former master, and maps only files of the new master from then on."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"x" * 100)
    now_s = 0.0
    former, present = (FileMaps(max_bytes=1 << 30, max_files=99, clock_s=lambda: now_s) for _ in range(2))
    former.get(str(tmp_path / "a"))
    (tmp_path / "a").unlink()
    now_s = SWEEP_INTERVAL_S
    present.get(str(tmp_path / "b"))
    assert list(former._maps) == []
    assert former._bytes == 0
    assert len(present._maps) == 1


def test_importing_storage_and_the_reader_loads_neither_ray_nor_pyarrow():
    modules = "storage.message_store, raymq.records.logfiles.log_reader"
    code = f"import sys, {modules}; print({{'ray', 'pyarrow', 'pandas'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
