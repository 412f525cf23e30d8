"""The connection of a Spark worker to raymq, for all tasks that it runs: those that read, and those that write.

The driver's user and its namespace go with each task, as a part of the cluster's address. A worker that gets tasks of
another one closes the connection of the one before.
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
    """The cluster that workers connect to, the user whom they act as (None where the driver acts as nobody), and the
    namespace whose names they use."""

    address: str
    user: Identity | None
    namespace: str = ""


def address_of_cluster(client: Client) -> ClusterAddress:
    """The Ray cluster of this process, the user whom it acts as, and the namespace of its client."""
    address: str = ray.get_runtime_context().gcs_address
    return ClusterAddress(address, identity.present(), client.names.name)


_kept: Final[dict[ClusterAddress, Client]] = {}
"""The client of this process, at most one."""
in_forked_child(_kept.clear)  # the parent's client is not the child's: a task in a child connects anew


def worker_client(at: ClusterAddress) -> Client:
    """This process's client, connected once and kept while its tasks are for the same cluster and user: Spark reuses
    its Python workers, for one task at a time. Raises as `raymq.connect`."""
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
