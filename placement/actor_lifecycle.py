"""Starting one storage actor on the node with its disk, and ending one actor cleanly."""

from __future__ import annotations

import logging
from typing import Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.door import access_for
from actors.replica.storage_actor import StorageActor
from placement.specs import StoragePlan
from raymq.common.errors import NoPermissionError, RaymqError
from raymq.common.names import CONSOLE, CONTROLLER, NAMESPACE
from raymq.remoting.actor_ref import ActorRef

CLOSE_TIMEOUT_S: Final = 30.0

logger = logging.getLogger(__name__)


def start_storage(plan: StoragePlan) -> None:
    """Create a replica's storage actor on its node, unless it exists. Does not wait for it to answer."""
    strategy = NodeAffinitySchedulingStrategy(plan.node_id, soft=False)
    StorageActor.options(name=str(plan.name), get_if_exists=True, scheduling_strategy=strategy).remote(
        plan.name, plan.settings, plan.store_host, plan.replication, plan.metrics, **access_for(str(plan.name))
    )


def end_actor(name: str) -> None:
    """Have an actor close, and end it for good. One that does not close in CLOSE_TIMEOUT_S is killed all the same.

    NoPermissionError: this process's user may not close it; it goes on.
    """
    try:
        handle = ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return  # gone meanwhile
    if name in (CONSOLE, CONTROLLER) or name.startswith(("pull-", "rebalance-", "broker-", "storage-", "replicator-")):
        try:
            ActorRef(name).call("close", timeout_s=CLOSE_TIMEOUT_S)
        except NoPermissionError:
            raise
        except RaymqError as error:
            logger.warning("%s did not close cleanly and is killed: %s", name, error)
    ray.kill(handle, no_restart=True)
