"""Spark on a topic: its messages as a DataFrame, on the Ray cluster that raymq runs in.

    session.py    a Spark session from RayDP, with the Java and the settings it needs
    source/       `read_topic`: the parts of a read (raymq.scan), read by Python workers in Spark's executors

The names are resolved when they are first used, so that other modules here can be imported without Spark.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydp_jobs.session import spark_session
    from raydp_jobs.source.reader import read_topic

__all__ = ["read_topic", "spark_session"]

_MODULES = {"read_topic": "raydp_jobs.source.reader", "spark_session": "raydp_jobs.session"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
