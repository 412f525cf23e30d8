"""The connection from a Spark worker process to raymq, which all tasks of the worker share.

Each task carries the cluster's address with the driver's user and namespace. If a worker gets a task with another
address, the worker closes its connection and opens another.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from typing import Final
from zipimport import zipimporter

import ray

from raymq.client.client import Client, connect
from raymq.common import identity
from raymq.common.closing import in_forked_child
from raymq.common.identity import Identity, acting_as


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """The data with which a Spark worker connects to raymq: the cluster's address, the user (None if the driver has no
    user), and the namespace."""

    address: str
    user: Identity | None
    namespace: str = ""


def address_of_cluster(client: Client) -> ClusterAddress:
    """Return the address of this process's Ray cluster, with the user of this process and the namespace of
    `client`."""
    address: str = ray.get_runtime_context().gcs_address
    return ClusterAddress(address, identity.present(), client.names.name)


_kept: Final[dict[ClusterAddress, Client]] = {}
"""The client of this worker process, by cluster address; contains at most one entry."""
in_forked_child(_kept.clear)  # A forked child process must not use its parent's client, so the child connects again.


def worker_client(at: ClusterAddress) -> Client:
    """Return this process's client, connected to the cluster `at`. Raises the errors of `raymq.connect`.

    The client stays connected while tasks have the same address. Spark reuses its Python workers and gives them one
    task at a time.
    """
    client = _kept.get(at)
    if client is None:
        for other in list(_kept):
            _kept.pop(other).close()
        spare_collections()
        spare_archives()
        with acting_as(at.user):
            client = _kept[at] = connect(at.address, namespace=at.namespace)
    return client


def spare_collections() -> None:
    """Exclude all objects that exist in this worker, such as imported modules, from later garbage collections.

    Spark's Python workers collect garbage after each task. With about 1,500 imported modules a collection takes 80 ms,
    longer than many tasks.
    """
    gc.collect()
    gc.freeze()


def spare_archives() -> None:
    """Keep the cached file lists of zip archives on the import path.

    Spark's Python workers drop these lists before each task. The import path contains Spark's own archives, one of them
    a jar of 5,000 files, and reading their lists takes 70 ms. An archive that is added later is still found, because it
    has a separate finder.
    """
    for finder in sys.path_importer_cache.values():
        if isinstance(finder, zipimporter):
            vars(finder)["invalidate_caches"] = _keep


def _keep() -> None:
    """Stand-in for the method that drops the cached file list of a zip archive. It does nothing, because the archive
    has not changed."""
