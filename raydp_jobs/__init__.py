"""Spark jobs on topics: a topic's messages as a DataFrame, on raymq's Ray cluster.

    session.py    a Spark session from RayDP, with the Java and the settings that it needs
    source/       `read_topic`: the parts of a read (raymq.client.scan), read by Python workers in Spark's executors
    stream/       `stream_topic`: topics as a streaming DataFrame, and the progress of its queries
    data_source/  ``format("raymq")`` of Spark 4, without RayDP: `register_raymq`
    jobs/         finished jobs, each with a command under `raymq job`
    sink/         `write_topic`, and `topic_sink` for streaming queries: rows to messages, each stored once

Spark is in the extra `spark` (``pip install 'raymq[spark]'``). The package imports each public name only when a program
first uses the name. So `raymq job replay`, `raymq job dead-letters` and the help of every job need no Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raymq.common.extras import require_extra
from raymq.common.numbers import NumberRange

if TYPE_CHECKING:
    from raydp_jobs.data_source.registration import register_raymq
    from raydp_jobs.session import spark_session
    from raydp_jobs.sink.writer import topic_sink, write_topic
    from raydp_jobs.source.reader import read_topic
    from raydp_jobs.stream.progress import stream_progress
    from raydp_jobs.stream.topic_stream import stream_topic

SPARK_COUNT: Final = NumberRange(1, 100_000)
"""The allowed range for the number of executors of a session, and for the number of cores of an executor."""

START_TIMEOUT_VARIABLE: Final = "RAYMQ_SPARK_START_TIMEOUT_S"
"""Environment variable that overrides the default start timeout of a Spark session, in seconds."""

__all__ = [
    "read_topic",
    "register_raymq",
    "spark_session",
    "stream_progress",
    "stream_topic",
    "topic_sink",
    "write_topic",
]

_MODULES = {
    "read_topic": "raydp_jobs.source.reader",
    "register_raymq": "raydp_jobs.data_source.registration",
    "spark_session": "raydp_jobs.session",
    "stream_progress": "raydp_jobs.stream.progress",
    "stream_topic": "raydp_jobs.stream.topic_stream",
    "topic_sink": "raydp_jobs.sink.writer",
    "write_topic": "raydp_jobs.sink.writer",
}
_WITHOUT_RAYDP = frozenset(("register_raymq",))
"""Public names that need Spark 4 without RayDP. They check Spark's version themselves."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_RAYDP:
        require_extra("spark", f"raydp_jobs.{name}")
    return getattr(import_module(_MODULES[name]), name)
