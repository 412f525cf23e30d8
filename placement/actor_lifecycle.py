"""Starts a storage actor on the node that has the store's disk, and ends an actor cleanly."""

from __future__ import annotations

import logging
from typing import Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.authenticated_server import access_for
from actors.replica.storage_actor import StorageActor
from placement.specs import StoragePlan
from raymq.common.errors import NoPermissionError, RaymqError
from raymq.common.names import CONSOLE, CONTROLLER
from raymq.remoting.actor_ref import ActorRef, find_actor

CLOSE_TIMEOUT_S: Final = 30.0

logger = logging.getLogger(__name__)


def start_storage(plan: StoragePlan) -> None:
    """Create a replica's storage actor on its node, unless the actor exists. Does not wait for the actor to answer."""
    strategy = NodeAffinitySchedulingStrategy(plan.node_id, soft=False)
    StorageActor.options(name=str(plan.name), get_if_exists=True, scheduling_strategy=strategy).remote(
        plan.name, plan.settings, plan.store_host, plan.replication, plan.metrics, **access_for(str(plan.name))
    )


def end_actor(name: str) -> None:
    """Close an actor and end it permanently. An actor that does not close within CLOSE_TIMEOUT_S is killed.

    Raises NoPermissionError if this process's user may not close the actor. The actor then keeps running.
    """
    handle = find_actor(name)
    if handle is None:
        return  # the actor has already ended, so there is nothing to close
    if name in (CONSOLE, CONTROLLER) or name.startswith(("pull-", "rebalance-", "broker-", "storage-", "replicator-")):
        try:
            ActorRef(name).call("close", timeout_s=CLOSE_TIMEOUT_S)
        except NoPermissionError:
            raise
        except RaymqError as error:
            logger.warning("actor %s did not close cleanly and is killed: %s", name, error)
    ray.kill(handle, no_restart=True)
