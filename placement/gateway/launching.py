"""Starts gateway processes on their nodes, and ends processes that the settings no longer name."""

from __future__ import annotations

from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.authenticated_server import access_for
from placement.actor_lifecycle import end_actor
from placement.gateway.actor import GatewayActor
from placement.inventory import head_node_id, running
from raymq.common.config.cluster import ClusterSettings
from raymq.common.config.gateway import GatewaySettings
from raymq.common.config.metrics import MetricsSettings
from raymq.common.errors import RaymqError
from raymq.common.names import GATEWAY_PREFIX, GatewayName
from raymq.remoting.actor_ref import ActorRef

GATEWAY_READY_TIMEOUT_S: Final = 60.0
GATEWAY_SETTINGS_TIMEOUT_S: Final = 5.0


def start_gateways(settings: ClusterSettings) -> list[dict[str, Any]]:
    """Start the gateway processes of the settings, unless they already run with these settings. A process with other
    settings is ended first, and a process that the settings do not name is ended, such as one of a node that has left.

    Returns the status of each process, with its name as `actor`, after all processes serve. If one does not start, ends
    all processes that this call has started, and raises the error.
    """
    wanted = {str(one.name): one for one in _planned(settings)}
    kept = set()
    for name in running():
        if name.startswith(GATEWAY_PREFIX):
            if name in wanted and _settings(name) == wanted[name]:
                kept.add(name)
            else:
                end_actor(name)
    try:
        for name, one in wanted.items():
            strategy = NodeAffinitySchedulingStrategy(one.name.node_id, soft=False)
            GatewayActor.options(name=name, get_if_exists=True, scheduling_strategy=strategy).remote(
                one, **access_for(name)
            )
        return [
            {"actor": name, **ActorRef(name).call("describe", timeout_s=GATEWAY_READY_TIMEOUT_S)} for name in wanted
        ]
    except BaseException:
        for name in wanted:
            if name not in kept:
                end_actor(name)
        raise


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
