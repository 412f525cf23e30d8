"""Tests that sending and reading tables does not import pandas. If pandas is installed, Arrow would otherwise import
it, which takes a second or more.

Each test program runs in a separate interpreter, in which any import of pandas raises an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

_RECORDS = """
import numpy as np, pyarrow as pa
from raymq.common.message import Message
from raymq.records.format.encode import encode_batch
from raymq.records.format.check import record_starts
def records(messages, ids=None):
    ids = ids or [f"{n:032X}" for n in range(len(messages))]
    return encode_batch(messages, 1, born_host=("::1", 1), born_timestamp_ms=1, message_ids=ids).records
plain = [Message("t", b"x" * 20)] * 100
rich = [
    Message("t", b"%d" % n * 9, f"tag{n % 3}", (f"k{n}",) * (n % 3), {f"p{n % 4}": "v" * (n + 1)}) for n in range(99)
]
"""
_DECODE = (
    _RECORDS
    + """
from raymq.records.kernels.columns import decode_columns
odd = [Message("t", b"x"), *rich]
for messages, ids in ((plain, None), (rich, None), (odd, ["", *["A"] * 99])):
    data = records(messages, ids)
    for body_type in ("binary_view", "binary", "large_binary"):
        batch = decode_columns(data, record_starts(data), broker_name="b", body_type=body_type, check_crc=True)
        assert batch.num_rows == len(messages)
damaged = records([Message("t", b"x", "tag")]).replace(b"tag", b"\\xff\\xfe\\xfd")
assert decode_columns(damaged, record_starts(damaged), broker_name="b").num_rows == 1
"""
)
_POLL_TABLE = (
    _RECORDS
    + """
from raymq.client.consumer.pull import fetched_records as polled
from raymq.client.consumer.subscription import Subscription
from raymq.common.message import MessageQueue
data = records(rich)
fetched = polled.FetchedRecords(polled.LocatedRecords.read(data), 99)
part = polled.PolledRecords(MessageQueue("t", "b", 1), Subscription.parse("t", "tag1 || tag2"), fetched, 99)
assert polled.as_table(polled.decode_tables([part])).num_rows == 66
"""
)
_SEND_TABLE = (
    _RECORDS
    + """
import sys
from raymq.records.kernels.encode import encode_columns
from raymq.records.kernels.message_columns import MessageColumns
from raymq.client.producer import table
from raymq.client.producer.table_rows import TableRows
from raymq.records.format.message_id import IdRange
source = pa.ipc.open_file(sys.argv[1]).read_all()
rows = TableRows("t", source)
rows.check(0, rows.count, 1000)
columns, hashes, keyed = rows.read(0, rows.count)
columns = MessageColumns.chained([columns.take(np.argsort(hashes)), columns[2:]])
batch = encode_columns("t", 0, columns.bodies, properties=columns.properties, tag_codes=columns.tag_codes,
                       born_host=("::1", 1), born_timestamp_ms=1, message_ids=IdRange("A", 0, len(columns)))
assert len(batch) == 2 * rows.count - 2
"""
)
_SPARK = (
    _RECORDS
    + """
from types import SimpleNamespace
from raydp_jobs.source import reader
from raymq.common.namespaces import NO_NAMESPACE
import numpy as np
from raymq.client.scan import batches
from raymq.client.scan.range_reader import RecordsChunk
from raymq.client.scan.ranges import OffsetRange
data = records(rich)
class Reads:
    def __init__(self, *clients): pass
    def read(self, *range):
        starts = record_starts(data)
        yield RecordsChunk(data, starts, np.diff(starts, append=len(data)), 1, np.zeros(1, np.int64))
batches.RangeReader = Reads
reader.worker_client = lambda address: SimpleNamespace(routes=None, storages=None, names=NO_NAMESPACE)
some = OffsetRange("t", "b", 1, 0, 1)
for tags in (frozenset(), frozenset({"tag1"})):
    assert sum(batch.num_rows for batch in reader.read_ranges([some], "", tags, True)) == (33 if tags else 99)
"""
)


def run(program: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `program` in an interpreter that exits with status 3 if it imports pandas."""
    (directory / "pandas").mkdir()
    (directory / "pandas" / "__init__.py").write_text("import os, traceback; traceback.print_stack(); os._exit(3)")
    path = os.pathsep.join([str(directory), os.getcwd()])
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("program", [_DECODE, _POLL_TABLE, _SPARK], ids=["decode_columns", "poll_table", "spark"])
def test_reading_imports_no_pandas(program: str, tmp_path: Path) -> None:
    done = run(program, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_sending_a_table_imports_no_pandas(tmp_path: Path) -> None:
    rows = range(100)
    table = pa.table(
        {
            "body": pa.array([b"%d" % n for n in rows], pa.binary_view()),
            "tags": [f"tag{n % 3}" if n % 7 else None for n in rows],
            "keys": [[f"k{n}"] * (n % 3) if n % 5 else None for n in rows],
            "properties": pa.array([[("a", "b")] * (n % 2) for n in rows], pa.map_(pa.string(), pa.string())),
            "sharding_key": pa.array([n if n % 2 else None for n in rows], pa.int64()),
        }
    )
    source = tmp_path / "rows.arrow"
    with pa.OSFile(str(source), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    done = run(_SEND_TABLE, tmp_path, str(source))
    assert (done.returncode, done.stderr) == (0, "")


def test_an_import_of_pandas_would_be_seen(tmp_path: Path) -> None:
    assert run("import pyarrow as pa; pa.array([b'x'])", tmp_path).returncode == 3
