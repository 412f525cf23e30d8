"""Starts gateway processes on their nodes, and ends processes that the settings no longer name.

Processes with former settings end only after the new settings are checked on their nodes, and they come back if the new
processes do not start.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.authenticated_server import access_for
from placement.actor_lifecycle import GOES_ON, brought_back, end_actor, refused
from placement.gateway.actor import GatewayActor
from placement.inventory import head_node_id, running
from raymq.common.config.cluster import ClusterSettings
from raymq.common.config.gateway import GatewaySettings
from raymq.common.config.metrics import MetricsSettings
from raymq.common.errors import RaymqError, RequestTimeoutError
from raymq.common.names import GATEWAY_PREFIX, GatewayName
from raymq.remoting.actor_ref import ActorRef

GATEWAY_READY_TIMEOUT_S: Final = 60.0
GATEWAY_SETTINGS_TIMEOUT_S: Final = 5.0
GATEWAY_CHECK_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


def start_gateways(settings: ClusterSettings) -> list[dict[str, Any]]:
    """Start the gateway processes of the settings, unless they already run with these settings. A process with other
    settings is ended first, and a process that the settings do not name is ended, such as one of a node that has left.

    Returns the status of each process, with its name as `actor`, after all processes serve. If the settings cannot be
    used on a node with a gateway, raises the error before any process ends. If a process does not start, ends all
    processes that this call has started, brings those with former settings back, and raises the error, whose text says
    what runs.
    """
    wanted = {str(one.name): one for one in _planned(settings)}
    found = {name: _settings(name) for name in running() if name.startswith(GATEWAY_PREFIX)}
    kept = {name for name in wanted if found.get(name) == wanted[name]}
    former = {name: one for name, one in found.items() if one is not None and name not in kept}
    _check(former, wanted)
    for name in found:
        if name not in kept:
            end_actor(name)
    try:
        return _started(wanted)
    except BaseException as error:
        for name in wanted:
            if name not in kept:
                end_actor(name)
        if not isinstance(error, RaymqError):
            # such as Ctrl-C: the former processes come back, and nobody waits for them
            _create(former)
            raise
        if not former:
            raise
        raise refused(error, brought_back("the gateway", partial(_started, former))) from None


def _check(former: Mapping[str, GatewaySettings], wanted: Mapping[str, GatewaySettings]) -> None:
    """Let one process of each node check the settings with which a process of this node would start. Raises the error
    of the first check that fails."""
    checks = {one.node: name for name, one in former.items()}
    new = {one.node: one for one in wanted.values()}
    for node, name in checks.items():
        if node in new:
            try:
                ActorRef(name).call("check", new[node], timeout_s=GATEWAY_CHECK_TIMEOUT_S)
            except RequestTimeoutError as error:
                # a process that does not answer is replaced
                logger.warning("%s does not check the new settings: %s", name, error)
            except RaymqError as error:
                raise refused(error, GOES_ON) from None


def _started(wanted: Mapping[str, GatewaySettings]) -> list[dict[str, Any]]:
    """Start processes, unless they run, and return the status of each after it serves. Raises the error of the first
    process that does not serve."""
    _create(wanted)
    return [{"actor": name, **ActorRef(name).call("describe", timeout_s=GATEWAY_READY_TIMEOUT_S)} for name in wanted]


def _create(wanted: Mapping[str, GatewaySettings]) -> None:
    """Create the actors of processes, unless they exist. Does not wait for them."""
    for name, one in wanted.items():
        strategy = NodeAffinitySchedulingStrategy(one.name.node_id, soft=False)
        GatewayActor.options(name=name, get_if_exists=True, scheduling_strategy=strategy).remote(
            one, **access_for(name)
        )


def _planned(settings: ClusterSettings) -> list[GatewaySettings]:
    """Return the settings of each gateway process, by node and number."""
    options, head = settings.gateway, head_node_id()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    chosen = [head] if options.nodes == "head" else sorted(nodes, key=lambda node_id: (node_id != head, node_id))
    metrics = MetricsSettings(settings.cluster_name, settings.metrics)
    return [
        GatewaySettings(GatewayName(node_id, index), nodes[node_id], options, metrics)
        for node_id in chosen
        for index in range(options.processes)
    ]


def _settings(name: str) -> GatewaySettings | None:
    """Return the settings of a running gateway process; None if it does not answer."""
    try:
        settings: GatewaySettings = ActorRef(name).call("settings", timeout_s=GATEWAY_SETTINGS_TIMEOUT_S)
    except RaymqError:
        return None
    return settings
