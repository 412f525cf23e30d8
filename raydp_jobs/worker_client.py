"""The connection of a Spark worker to raymq, for all tasks that it runs: those that read, and those that write."""

from __future__ import annotations

import gc
import sys
from functools import lru_cache
from zipimport import zipimporter

import ray

from raymq.client import Client, connect


def address_of_cluster() -> str:
    """The address at which workers connect to the Ray cluster of this process."""
    address: str = ray.get_runtime_context().gcs_address
    return address


@lru_cache(maxsize=1)
def worker_client(address: str) -> Client:
    """This process's client, connected once and kept for its life: Spark reuses its Python workers."""
    spare_collections()
    spare_archives()
    return connect(address)


def spare_collections() -> None:
    """Have the garbage collector leave alone what this worker has imported.

    Spark's Python workers collect garbage after each task. With some 1,500 modules imported that takes 80 ms, which is
    longer than many a task.
    """
    gc.collect()
    gc.freeze()


def spare_archives() -> None:
    """Have imports keep the tables of contents of the zip archives that they have looked into.

    Spark's Python workers forget them before each task. Spark's own archives, a jar of 5,000 files among them, are on
    the import path, and to read their tables anew takes 70 ms. An archive that is added later is still found: it has
    a finder of its own.
    """
    for finder in sys.path_importer_cache.values():
        if isinstance(finder, zipimporter):
            vars(finder)["invalidate_caches"] = _keep


def _keep() -> None:
    """Nothing: the archive is as it was."""
