"""Tests of the order that a task gives its rows by their content: the same rows give the same order, in memory and in a
file, however they are divided and ordered before."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from raydp_jobs.sink.content_order import in_content_order
from tests.support.cases import chaos_seed, examples

SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("tags", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("sharding_key", pa.int64()),
        ("deliver_time", pa.timestamp("us", "UTC")),
    ]
)


def random_row(random: Random) -> dict[str, Any]:
    return {
        "body": random.randbytes(random.choice((0, 1, 2, 300))),
        "tags": random.choice((None, "", "paid")),
        "keys": random.choice((None, [], ["a"], ["a", "b"], ["b", "a"])),
        "properties": random.choice((None, [], [("a", "1"), ("b", "2")])),
        "sharding_key": random.choice((None, 1, -1)),
        "deliver_time": random.choice((None, datetime(2026, 3, 1, tzinfo=UTC) + timedelta(microseconds=1))),
    }


def divided(random: Random, rows: list[dict[str, Any]], names: list[str]) -> list[pa.RecordBatch]:
    """Return the rows in a random order, in batches of random sizes."""
    schema = pa.schema([SCHEMA.field(name) for name in names])
    left = random.sample(rows, len(rows))
    batches = []
    while left:
        count = random.randint(0, 40)
        batches.append(pa.RecordBatch.from_pylist([{n: row[n] for n in names} for row in left[:count]], schema))
        left = left[count:]
    return batches


def rows_of(batches: Any) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def test_the_order_depends_only_on_the_rows(tmp_path: Path) -> None:
    random = Random(chaos_seed())
    for _ in range(examples(40)):
        names = sorted(random.sample(SCHEMA.names, random.randint(1, 6)))
        rows = [random_row(random) for _ in range(random.randint(0, 200))]
        found = [
            rows_of(in_content_order(divided(random, rows, names), str(tmp_path), spool))
            for spool in (0, 1000, 64 << 20, 64 << 20)
        ]
        assert found[0] == found[1] == found[2] == found[3]
        assert sorted(map(repr, found[0])) == sorted(map(repr, rows_of(divided(random, rows, names))))
        assert list(tmp_path.iterdir()) == []


def test_a_map_has_no_order_and_a_list_has_one() -> None:
    def first_of(column: str, *values: Any) -> Any:
        schema = pa.schema([SCHEMA.field(column)])
        batches = [pa.RecordBatch.from_pylist([{column: value}], schema) for value in values]
        return rows_of(in_content_order(batches))[0][column]

    one, other = [("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")]
    assert first_of("properties", one, other) == one
    assert first_of("properties", other, one) == other, "equal maps must keep their order"
    assert first_of("keys", ["a", "b"], ["b", "a"]) == first_of("keys", ["b", "a"], ["a", "b"])


def test_a_batch_of_large_rows_is_divided() -> None:
    batch = pa.RecordBatch.from_pylist([{"body": b"%d" % number * (1 << 20)} for number in range(10, 40)])
    found = list(in_content_order([batch]))
    assert len(found) > 3
    assert sorted(row["body"] for row in rows_of(found)) == batch.column("body").to_pylist()


def test_the_temporary_file_is_deleted_if_the_rows_end_early(tmp_path: Path) -> None:
    batches = divided(Random(1), [random_row(Random(number)) for number in range(100)], ["body"])
    rows = in_content_order(batches, str(tmp_path), 0)
    next(rows)
    assert list(tmp_path.iterdir()) != []
    rows.close()  # type: ignore[attr-defined]  # a generator
    assert list(tmp_path.iterdir()) == []

    def fails() -> Any:
        yield batches[0]
        raise RuntimeError("no more rows")

    with pytest.raises(RuntimeError, match="no more rows"):
        list(in_content_order(fails(), str(tmp_path), 0))
    assert list(tmp_path.iterdir()) == []
