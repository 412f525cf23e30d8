"""Empty classes in place of the classes of Spark 4, for unit tests of `format("raymq")` beside Spark 3.5."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

MODULES = {
    "pyspark.sql.datasource": (
        *("DataSourceReader", "DataSourceStreamReader", "DataSourceStreamWriter", "DataSourceWriter"),
        *("DataSourceArrowWriter", "DataSourceStreamArrowWriter", "WriterCommitMessage", "Filter"),
    ),
    "pyspark.sql.streaming.datasource": ("ReadAllAvailable", "ReadLimit", "SupportsTriggerAvailableNow"),
}


class DataSource:
    """Spark's base class of a data source."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options


class InputPartition:
    """Spark's base class of a partition."""

    def __init__(self, value: object) -> None:
        self.value = value


class ReadMaxRows:
    """Spark's limit of the rows of a batch."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


@contextmanager
def with_fake_spark4(patch: pytest.MonkeyPatch, *names: str) -> Iterator[list[Any]]:
    """Import modules of `raydp_jobs.data_source` with the empty classes. Yields the modules, and forgets them at the
    end. `names`: such as ``stream_reader``."""
    for name, classes in MODULES.items():
        fake = ModuleType(name)
        for one in classes:
            setattr(fake, one, type(one, (), {}))
        patch.setitem(sys.modules, name, fake)
    for one in (DataSource, InputPartition):
        patch.setattr(sys.modules["pyspark.sql.datasource"], one.__name__, one, raising=False)
    patch.setattr(sys.modules["pyspark.sql.streaming.datasource"], "ReadMaxRows", ReadMaxRows, raising=False)
    before = set(sys.modules)
    try:
        yield [import_module(f"raydp_jobs.data_source.{name}") for name in names]
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("raydp_jobs.data_source"):
                del sys.modules[name]


def in_task(patch: pytest.MonkeyPatch, module: Any, **properties: str) -> None:
    """Let the code of a module run in a task of Spark with these properties."""
    context = SimpleNamespace(getLocalProperty=properties.get, partitionId=lambda: 0)
    patch.setattr(module, "TaskContext", SimpleNamespace(get=lambda: context))
