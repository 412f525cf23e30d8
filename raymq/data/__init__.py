"""Topics as datasets of Ray Data, and datasets as messages of a topic.

    dataset = raymq.data.read_topic("orders", start_offset="earliest", end_offset="latest")
    dataset.select_columns(["offset", "tags"]).groupby("tags").count().show()
    raymq.data.write_topic(results, "results", key_field="customer")

    offsets.py         the options start_offset and end_offset, their offset ranges, and the ranges of each task
    columns.py         the columns of a dataset, computed from the columns of a scan
    shared_client.py   the client that all read and write tasks of a Ray worker process share
    datasource.py      TopicDatasource
    reading.py         `read_topic`
    iterating.py       `iter_topic`
    messages.py        rows as messages
    datasink.py        TopicDatasink and `write_topic`

The public names are imported at their first use, because `import ray.data` takes a second and needs the extra `data`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raymq.common.extras import require_extra

if TYPE_CHECKING:
    from raymq.data.datasink import (
        TopicDatasink as TopicDatasink,
        WriteSummary as WriteSummary,
        write_topic as write_topic,
    )
    from raymq.data.datasource import TopicDatasource as TopicDatasource
    from raymq.data.iterating import iter_topic as iter_topic
    from raymq.data.reading import read_topic as read_topic

_HOMES: Final = {
    "TopicDatasink": "raymq.data.datasink",
    "TopicDatasource": "raymq.data.datasource",
    "WriteSummary": "raymq.data.datasink",
    "iter_topic": "raymq.data.iterating",
    "read_topic": "raymq.data.reading",
    "write_topic": "raymq.data.datasink",
}
"""Maps each public name of the package to the module that defines it."""

__all__ = ["TopicDatasink", "TopicDatasource", "WriteSummary", "iter_topic", "read_topic", "write_topic"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raymq.data' has no attribute {name!r}")
    require_extra("data", "raymq.data")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
