"""Tests of torn records: a record is torn if its end is zeros, as after a crash, and no intact record follows."""

from __future__ import annotations

import pytest

from raymq.common.message import Message
from raymq.records.format.check import check_record
from raymq.records.format.encode import encode_batch
from raymq.records.format.layout import encode_blank
from storage.dispatch.record_check import is_torn
from tests.support.stores.rocketmq_records import Row, encode_row

FILE_START = 1 << 20
FILE_BYTES = 4096


def file_with(properties: bytes, *, ends_at: int, behind: bytes = b"") -> tuple[memoryview, int, int]:
    """Return a log file that contains a record with these properties, the record's start, and the record's size. The
    record ends at byte `ends_at` of the file."""
    size = len(encode_row(Row("T", 0, 0, properties), 0))
    start = ends_at - size
    record = encode_row(Row("T", 0, 0, properties), FILE_START + start)
    data = (b"?" * start + record + behind).ljust(FILE_BYTES, b"\0")
    assert check_record(data, start) == (size, True)
    return memoryview(data), start, size


@pytest.mark.parametrize(
    ("properties", "ends_at", "torn"),
    [
        (b"TAGS\x01t", 1024 + 100, False),
        (b"", 1024 + 100, False),
        # The next records are whole, not torn by a power failure, although the value of their last property ends with a
        # NUL byte. The NUL byte is in the middle or at the end of a disk sector.
        (b"TAGS\x01t\x02bin\x01C-string\0", 1024 + 100, False),
        (b"bin\x01C-string\0", 1024, False),
        (b"bin\x01\0", 1024 + 100, False),
        # These records are torn: in the disk sector in which the record ends, all bytes of the record are zero.
        (b"TAGS\x01t\x02bin\x01C-string\0", 1024 + 1, True),
        (b"TAGS\x01t\x02bin\x01C-string" + bytes(100), 1024 + 100, True),
        (b"TAGS\x01t\x02bin\x01C-string" + bytes(100), 1024 + 101, False),
        # These records are torn: the bytes before the final zeros are not a sequence of complete properties.
        (b"TAGS\x01t\x02\0\0", 1024 + 100, True),
        (b"TAGS\x01t\x02bi\0\0", 1024 + 100, True),
        (b"TAGS\x01t\x02\x01v\0", 1024 + 100, True),
        (bytes(20), 1024 + 100, True),
    ],
)
def test_the_last_record_of_a_log(properties, ends_at, torn):
    data, start, size = file_with(properties, ends_at=ends_at)
    assert is_torn(data, start, size, file_start=FILE_START) is torn


def behind(what: str, position: int) -> bytes:
    record = encode_row(Row("T", 0, 1, b"TAGS\x01t"), FILE_START + position)
    return {
        "a record": record,
        "a record that ends in NUL": encode_row(Row("T", 0, 1, b"n\x01\0"), FILE_START + position),
        "a BLANK": encode_blank(FILE_BYTES - position),
        "a damaged record": record[:90] + b"?" + record[91:],
        "a record that cannot be": encode_row(Row("T", 0, 1 << 40, b""), FILE_START + position),
        "a BLANK of elsewhere": encode_blank(77),
        "half a record": record[:60],
    }[what]


@pytest.mark.parametrize("what", ["a record", "a record that ends in NUL", "a BLANK"])
def test_a_record_is_whole_if_the_log_continues(what):
    data, start, size = file_with(b"TAGS\x01t\x02" + bytes(600), ends_at=2000, behind=behind(what, 2000))
    assert not is_torn(data, start, size, file_start=FILE_START)


@pytest.mark.parametrize(
    "what", ["a damaged record", "a record that cannot be", "a BLANK of elsewhere", "half a record"]
)
def test_a_damaged_record_does_not_affect_the_record_before(what):
    data, start, size = file_with(b"TAGS\x01t\x02" + bytes(600), ends_at=2000, behind=behind(what, 2000))
    assert is_torn(data, start, size, file_start=FILE_START)


def test_the_properties_of_a_record_with_a_long_topic_and_an_ipv6_host_are_found():
    batch = encode_batch(
        [Message("%RETRY%" + "g" * 200, b"body", tags="t")], 0, born_host=("::1", 1), born_timestamp_ms=1,
        message_ids=["0" * 32],
    )  # fmt: skip
    record = bytes(batch.records)
    last = record.removesuffix(b"\x02").rpartition(b"\x02")[2]

    def torn(missing: int) -> bool:
        cut = record[:-missing] + bytes(missing)
        assert check_record(cut).ok
        return is_torn(memoryview(cut), 0, len(cut), file_start=0)

    assert not torn(1)
    assert torn(len(last) + 1)
