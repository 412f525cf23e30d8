"""Gives the rows of a partition an order that depends only on their content. A repeated task must write its rows in the
order of the first attempt, but after an exchange Spark delivers them in any order.

A data source in Python cannot ask Spark to sort, so the task sorts: by a digest of each row. Equal rows are
interchangeable, so each order of equal rows is the same order.

    batches ──► rows up to SPOOL_BYTES in memory, more in a temporary file, which is mapped
        └────► 16 bytes per row ──► sorted ──► batches of about SLICE_BYTES in the new order

The module uses neither Spark nor Ray.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

SPOOL_BYTES: Final = 64 << 20
"""Maximum size of the rows that stay in memory. A larger partition goes to a temporary file."""
SLICE_BYTES: Final = 8 << 20
"""Approximate size of a returned batch."""
SLICE_ROWS: Final = 8192
"""Maximum number of rows of a returned batch."""
_DIGEST_BYTES: Final = 16


def in_content_order(
    batches: Iterable[pa.RecordBatch], directory: str | None = None, spool_bytes: int = SPOOL_BYTES
) -> Iterator[pa.RecordBatch]:
    """Return all rows of `batches`, which have one schema, in an order that depends only on the rows. The order of the
    input has no effect.

    `directory`: for the temporary file, which exists until the last batch was taken; by default the system's. Raises
    OSError if the file cannot be written.
    """
    held: list[pa.RecordBatch] = []
    digests: list[bytes] = []
    size = 0
    with tempfile.TemporaryDirectory(prefix="raymq-sort-", dir=directory) as folder:
        path, spool = Path(folder) / "rows.arrow", None
        try:
            for batch in batches:
                if not batch.num_rows:
                    continue
                digests.append(_digests(batch))
                size += batch.nbytes
                held.append(batch)
                if size > spool_bytes and spool is None:
                    spool = pa.ipc.new_file(str(path), batch.schema)
                if spool is not None:
                    for one in held:
                        spool.write_batch(one)
                    held.clear()
        finally:
            if spool is not None:
                spool.close()
        if spool is None:
            yield from _sorted(held, digests, size)
            return
        with pa.memory_map(str(path)) as mapped:
            reader = pa.ipc.open_file(mapped)
            spooled = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            yield from _sorted(spooled, digests, size)


def _digests(batch: pa.RecordBatch) -> bytes:
    """Return the digests of the rows of a batch, one after the other. Columns are taken by name, so that their order
    has no effect."""
    columns: list[Sequence[Any]] = [_values(batch.column(name)) for name in sorted(batch.schema.names)]
    return b"".join(map(_digest, zip(*columns, strict=True)))


def _values(column: pa.Array) -> Sequence[Any]:
    """Return the values of a column. A time is a number, because the text of a Python time depends on installed time
    zones."""
    plain = column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column
    return list(plain.to_pylist())


def _digest(row: Sequence[Any]) -> bytes:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for value in row:
        if isinstance(value, bytes):
            digest.update(b"%d:" % len(value))
            digest.update(value)
        elif isinstance(value, list) and value and isinstance(value[0], tuple):
            digest.update(repr(sorted(value)).encode())  # the entries of a map have no order
        else:
            digest.update(repr(value).encode())
    return digest.digest()


def _sorted(batches: Sequence[pa.RecordBatch], digests: Sequence[bytes], size: int) -> Iterator[pa.RecordBatch]:
    if not batches:
        return
    keys = np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, _DIGEST_BYTES // 8)
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    firsts = np.cumsum([0, *(batch.num_rows for batch in batches)])
    step = max(1, min(SLICE_ROWS, SLICE_BYTES * len(order) // max(1, size)))
    for first in range(0, len(order), step):
        chosen = order[first : first + step]
        owners = np.searchsorted(firsts, chosen, side="right") - 1
        parts, places = [], []
        for owner in np.unique(owners):
            mine = np.flatnonzero(owners == owner)
            parts.append(batches[owner].take(pa.array(chosen[mine] - firsts[owner])))
            places.append(mine)
        table = pa.Table.from_batches(parts)
        back = np.argsort(np.concatenate(places), kind="stable")
        yield from table.take(pa.array(back)).combine_chunks().to_batches()
