"""Starts a storage actor on the node that has the store's disk, and ends actors cleanly, in an order that keeps data
complete. Has the steps that replace a server with changed settings, and that keep it if the new settings are wrong.

Actors of one kind close at the same time. So a stop does not take longer if a cluster has more stores, and a stop waits
CLOSE_TIMEOUT_S only once for all actors of one kind that hang.

Only `start_storage` imports the servers' code. The import takes 0.2 s of processor time, which a program that stops
actors saves.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection, Iterable
from itertools import groupby
from typing import Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.authenticated_server import access_for
from placement.inventory import running
from placement.specs import StoragePlan
from raymq.client.cluster.launcher import ProgressCallback
from raymq.common.errors import ConfigError, NoPermissionError, RaymqError, ServiceNotAvailableError
from raymq.common.names import CONSOLE, CONTROLLER, GATEWAY_PREFIX
from raymq.common.parallel import map_parallel
from raymq.remoting.actor_ref import ActorRef, find_actor

CLOSE_TIMEOUT_S: Final = 30.0
CLOSING_MAX: Final = 16
"""Maximum number of actors that close at the same time."""
_CLOSED_PREFIXES: Final = (GATEWAY_PREFIX, "pull-", "rebalance-", "broker-", "storage-", "replicator-")
"""The name prefixes of the actors that have a method `close`."""
GOES_ON: Final = "nothing was changed: what ran before goes on"
"""The sentence in the error of a start whose settings the former server has refused."""

logger = logging.getLogger(__name__)


def start_storage(plan: StoragePlan) -> None:
    """Create a replica's storage actor on its node, unless the actor exists. Does not wait for the actor to answer."""
    from actors.replica.storage_actor import StorageActor

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
    if name in (CONSOLE, CONTROLLER) or name.startswith(_CLOSED_PREFIXES):
        try:
            ActorRef(name).call("close", timeout_s=CLOSE_TIMEOUT_S)
        except NoPermissionError:
            raise
        except RaymqError as error:
            logger.warning("actor %s did not close cleanly and is killed: %s", name, error)
    ray.kill(handle, no_restart=True)


def stop_actors(progress: ProgressCallback = lambda step: None, only: Iterable[str] | None = None) -> list[str]:
    """Stop raymq's actors, or only the actors in `only`: consumers first, stores last. Returns the names of the stopped
    actors.

    Actors of one kind, such as all stores, stop at the same time, at most CLOSING_MAX of them. All actors of one kind
    end before an actor of the next kind stops. An actor that does not close within CLOSE_TIMEOUT_S is killed. The store
    of a killed actor recovers when it is opened again. Raises NoPermissionError after the stop of the actors of the
    same kind, if this process's user may not close an actor. The actors of the next kinds then keep running.
    """
    names = running() if only is None else list(only)
    order = sorted(names, key=lambda name: (_stop_rank(name), name))
    for _, one_kind in groupby(order, key=_stop_rank):
        stopping = list(one_kind)
        progress(f"stopping {', '.join(stopping)}")
        map_parallel(end_actor, stopping, threads_max=CLOSING_MAX, name="stop")
    return order


def check_address(host: str, port: int, *, held: Collection[int], setting: str) -> None:
    """Raise ServiceNotAvailableError if a server of this node could not listen at `host` and `port`.

    `held`: ports that the former server holds and will give up, so that only the host is checked. `setting`: the
    setting of the port, for the error. Port 0 means any free port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, 0 if port in held else port), family=family).close()
    except OSError as error:
        raise ServiceNotAvailableError(
            f"nothing can listen at host {host}, port {port}, of this node: {error.strerror or error}; see "
            f"{setting.partition('.')[0]}.host and {setting}"
        ) from None


def refused(error: RaymqError, sentence: str) -> RaymqError:
    """Return the error of a start with a sentence about what runs now. The error keeps its kind: wrong settings, or a
    server that is not available."""
    kind = ConfigError if isinstance(error, ConfigError) else ServiceNotAvailableError
    return kind(f"{error}; {sentence}")


def brought_back(what: str, start: Callable[[], object]) -> str:
    """Start the former actors again with `start`, and return a sentence about what runs now. `what`: the name of the
    service in the sentence."""
    try:
        start()
    except RaymqError as error:
        logger.warning("%s does not start with its former settings: %s", what, error)
        return f"{what} has its former settings again, but does not serve yet: {error}"
    return f"{what} runs again with its former settings"


def _stop_rank(name: str) -> int:
    # Stop the Controller before the stores. Otherwise it would elect new masters while the stores of a broker group
    # close one after another.
    for rank, prefix in enumerate(
        (CONSOLE, GATEWAY_PREFIX, "pull-", "rebalance-", "broker-", "nameserver-", CONTROLLER, "replicator-")
    ):
        if name.startswith(prefix):
            return rank
    return 9 if name.startswith("storage-") else 8
