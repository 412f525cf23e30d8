"""Checks and sorts a DataFrame before it is written to a topic. The driver checks the types of the columns, and gives
the rows a fixed order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, Literal

from pyspark.sql import Column, DataFrame, functions, types

from raydp_jobs.spark_internals import count_partitions, plan_text, present_order, rows_text
from raymq.common.errors import InvalidArgumentError

Sort = Literal["auto", "always", "never"]

_SHUFFLE: Final = re.compile("(?<!Broadcast)Exchange")
"""Matches an exchange (shuffle) in the text of a Spark plan; after an exchange, rows have no fixed order. Broadcasting
the small side of a join keeps the order, and does not match."""


def _is_texts(kind: types.DataType) -> bool:
    return isinstance(kind, types.ArrayType) and isinstance(kind.elementType, types.StringType)


def _is_text_map(kind: types.DataType) -> bool:
    is_text = isinstance(kind, types.MapType) and isinstance(kind.keyType, types.StringType)
    return is_text and isinstance(kind.valueType, types.StringType)


_KINDS: Final[dict[str, tuple[Callable[[types.DataType], bool], str, str]]] = {
    "body": (
        lambda kind: isinstance(kind, (types.BinaryType, types.StringType)),
        "binary or string",
        "F.to_json(F.struct(…)) makes one string of several columns, F.col('body').cast('string') one of a number",
    ),
    "tags": (lambda kind: isinstance(kind, types.StringType), "string", "F.col('tags').cast('string')"),
    "keys": (
        lambda kind: isinstance(kind, types.StringType) or _is_texts(kind),
        "string or array of strings",
        "F.array(F.col('keys').cast('string'))",
    ),
    "properties": (
        _is_text_map,
        "map of string to string",
        "F.create_map(F.lit('name'), F.col('value').cast('string'))",
    ),
    "sharding_key": (
        lambda kind: isinstance(
            kind, (types.StringType, types.ByteType, types.ShortType, types.IntegerType, types.LongType)
        ),
        "string or whole number",
        "F.col('sharding_key').cast('string')",
    ),
    "deliver_time": (
        lambda kind: isinstance(kind, types.TimestampType),
        "timestamp",
        "F.col('deliver_time').cast('timestamp')",
    ),
}
"""Requirements for the columns of a DataFrame that is written to a topic, by column name: a check of the column's type,
the name of the expected type, and an example expression that creates a valid value."""


def check_columns(df: DataFrame) -> None:
    """Raise InvalidArgumentError unless the rows of `df` can be written to a topic. The error's text lists all problems
    and how to solve them."""
    check_fields(list(df.schema))


def check_fields(fields: Sequence[types.StructField]) -> None:
    """Raise InvalidArgumentError unless rows with these columns can be written to a topic. The error's text lists all
    problems and how to solve them."""
    names = [field.name for field in fields]
    wrong = (
        [] if "body" in names else ["column 'body' is missing: rename a column with df.withColumnRenamed(…, 'body')"]
    )
    wrong += [f"column {name!r} exists twice" for name in sorted({name for name in names if names.count(name) > 1})]
    known = [name for name in names if name in _KINDS]
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        chosen = ", ".join(repr(name) for name in dict.fromkeys(["body", *known]))
        wrong.append(
            f"a message has no {', '.join(map(repr, unknown))}: leave columns out with df.select({chosen}), or put "
            "them into 'properties' or 'body'"
        )
    for field in fields:
        if field.name in _KINDS:
            fits, expected, mend = _KINDS[field.name]
            if not fits(field.dataType):
                wrong.append(f"column {field.name!r} is {field.dataType.simpleString()}, not {expected}: use {mend}")
    if wrong:
        raise InvalidArgumentError(f"the DataFrame cannot be written to a topic: {'; '.join(wrong)}")


def check_sort(sort: Sort) -> None:
    """Raise InvalidArgumentError if `sort` is not "auto", "always" or "never"."""
    if sort not in ("auto", "always", "never"):
        raise InvalidArgumentError(f"sort must be 'auto', 'always' or 'never', not {sort!r}")


def in_fixed_order(df: DataFrame, sort: Sort) -> DataFrame:
    """Return `df` with its rows in an order that is the same each time a partition is computed.

    Rows have no fixed order if Spark exchanged them between tasks (shuffle). With "auto" such rows are sorted within
    their partition: by the DataFrame's present order, then by a hash of all columns, then by the columns. "always"
    sorts all rows, "never" sorts none. Raises InvalidArgumentError for any other `sort`.
    """
    check_sort(sort)
    if sort == "never" or (sort == "auto" and not has_exchange(df)):
        return df
    given = present_order(df)
    if given is None:
        # Do not sort these rows: their present order depends on columns that were dropped, so a sort by the remaining
        # columns would lose this order.
        return df
    values = [_sortable(field) for field in df.schema]
    return df.sortWithinPartitions(*given, functions.xxhash64(*values), *values)


def has_exchange(df: DataFrame) -> bool:
    """Return True if the DataFrame's plan has an exchange (shuffle of rows between stages). The order of the rows is
    then not fixed: rows arrive in the order in which the tasks of the earlier stage end."""
    plan = plan_text(df)
    if _SHUFFLE.search(plan):
        return True
    # In the batch of a streaming query, the plan has the step ExistingRDD. This step hides the plan that computed its
    # rows, so look for a shuffle in the RDD's description.
    if "ExistingRDD" not in plan:
        return False
    return "Shuffled" in rows_text(df)


def is_adaptive(df: DataFrame) -> bool:
    """Return True if Spark chooses the DataFrame's number of partitions only after earlier stages have run (adaptive
    execution)."""
    return plan_text(df).startswith("AdaptiveSparkPlan")


def partitions_of(df: DataFrame) -> int:
    """Return the number of partitions of a DataFrame; 0 if the number is not known yet."""
    return 0 if is_adaptive(df) else count_partitions(df)


def _sortable(field: types.StructField) -> Column:
    column = functions.col(f"`{field.name}`")
    return functions.array_sort(functions.map_entries(column)) if isinstance(field.dataType, types.MapType) else column
