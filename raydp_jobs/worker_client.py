"""The connection of a Spark worker to raymq, for all tasks that it runs: those that read, and those that write."""

from __future__ import annotations

import gc
from functools import lru_cache

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
    return connect(address)


def spare_collections() -> None:
    """Have the garbage collector leave alone what this worker has imported.

    Spark's Python workers collect garbage after each task. With some 1,500 modules imported that takes 80 ms, which is
    longer than many a task.
    """
    gc.collect()
    gc.freeze()
