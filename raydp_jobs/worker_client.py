"""The connection of a Spark worker to raymq, for all of its tasks.

The driver's user and namespace are sent with each task, as a part of the cluster's address. If a worker gets a task
with another address, it closes its connection and opens another.
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
    """The cluster to which workers connect, their user (None without a user in the driver), and their namespace."""

    address: str
    user: Identity | None
    namespace: str = ""


def address_of_cluster(client: Client) -> ClusterAddress:
    """Return the Ray cluster of this process, its user, and the namespace of its client."""
    address: str = ray.get_runtime_context().gcs_address
    return ClusterAddress(address, identity.present(), client.names.name)


_kept: Final[dict[ClusterAddress, Client]] = {}
"""The client of this process, at most one."""
in_forked_child(_kept.clear)  # a forked child must not use the parent's client: its tasks connect again


def worker_client(at: ClusterAddress) -> Client:
    """Return this process's client. It stays connected while its tasks have the same address: Spark reuses its Python
    workers, for one task at a time. Raises like `raymq.connect`."""
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
    """Exclude the imported modules of this worker from garbage collection.

    Spark's Python workers collect garbage after each task. With about 1,500 imported modules this takes 80 ms, longer
    than many tasks.
    """
    gc.collect()
    gc.freeze()


def spare_archives() -> None:
    """Let imports keep the tables of contents of zip archives.

    Spark's Python workers drop these tables before each task. The import path contains Spark's own archives, one of
    them a jar of 5,000 files, and reading their tables takes 70 ms. An archive that is added later is still found,
    because it has its own finder.
    """
    for finder in sys.path_importer_cache.values():
        if isinstance(finder, zipimporter):
            vars(finder)["invalidate_caches"] = _keep


def _keep() -> None:
    """Do nothing: the archive is unchanged."""
