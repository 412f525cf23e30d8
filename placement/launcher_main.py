"""The program that starts, stops and inspects raymq's servers for `raymq.client.cluster.launcher`, which defines the
protocol.

`raymq.client.cluster.server_path` runs this program with Python's option `-P` in the root directory. So the import path
of the program's Ray job contains only installed packages. The servers inherit this import path from the job.

An action imports the modules that only this action needs, because all of them take 0.5 s of processor time. Only a
start needs the servers' code, and only the console's actions need the console's code.
"""

from __future__ import annotations

import base64
import json
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import ray

from placement import operations
from placement.access import launching as access
from placement.actor_lifecycle import stop_actors
from placement.inventory import inventory, running
from placement.plan import Plan, differences, make_plan, with_found_stores
from placement.status import cluster_status
from raymq.client.cluster.attach import attach_ray
from raymq.common.config.cluster import ClusterSettings
from raymq.common.errors import ClusterNotFoundError, RaymqError, ServiceNotAvailableError
from raymq.common.names import GATEWAY_PREFIX

if TYPE_CHECKING:
    from placement.replica_nodes import Node


def main() -> None:
    """Read one request from standard input, execute it, and write the answer to standard output."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Ignore ctrl-C in a terminal: it is meant for the user's program, which then ends this launcher program.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request = json.loads(sys.stdin.readline())
    try:
        attach_ray(request["address"])
        _write_answer(result=_carry_out(request))
    except RaymqError as error:
        _write_answer(error=base64.b64encode(pickle.dumps(error)).decode())
    except ConnectionError as error:
        unreachable = ServiceNotAvailableError(f"cannot connect to Ray at {request['address']}: {error}")
        _write_answer(error=base64.b64encode(pickle.dumps(unreachable)).decode())
    finally:
        ray.shutdown()


def _carry_out(request: dict[str, Any]) -> Any:
    action = request["action"]
    if action == "start":
        return _start(request)
    if action == "gateways":
        settings = ClusterSettings(**request["settings"])
        _require_cluster()
        # gateways, like all servers, get the users and the key of raymq's own actors from the process that starts them
        access.prepare(settings.access, settings.data_dir)
        return _start_gateways(settings)
    access.act_as_owner(request["settings"])
    if action == "console":
        return _start_console(ClusterSettings(**request["settings"]))
    if action == "stop_console":
        from placement.console.actor import stop_console

        return stop_console()
    if action == "stop_gateways":
        return stop_actors(_progress, only=[name for name in running() if name.startswith(GATEWAY_PREFIX)])
    if action == "stop":
        return stop_actors(_progress)
    if action == "drain":
        return operations.drain(request["node"], drained=not request["undo"], progress=_progress)
    if action == "balance":
        return operations.balance(_progress)
    if action == "close":
        return operations.close_stores_here(_progress)
    if action == "board":
        return operations.install_on_head(request["output"])
    return cluster_status().report


def _start(request: dict[str, Any]) -> dict[str, Any]:
    from placement import launch

    settings = ClusterSettings(**request["settings"])
    access.prepare(settings.access, settings.data_dir)
    known, draining = operations.placed_replicas()
    nodes = inventory(settings.data_dir, draining, node_label=settings.placement.node_label)
    settings, notes = with_found_stores(settings, request.get("given", ()), nodes)
    before = running()
    plan = make_plan(settings, nodes, known)
    launch.start(plan, _progress, log_bytes=_log_bytes(plan, nodes))
    if before:
        notes += _changes(plan, before, launch.store_roots_here())
    if request.get("board") and settings.metrics.enable:
        operations.try_to_install(_progress)
    if settings.console.enable:
        _progress("starting the console")
        _start_console(settings)
    if settings.gateway.enable:
        _progress("starting the gateway")
        _start_gateways(settings)
    data_dir = None if before else str(settings.data_dir)
    return {"actors": running(), "notes": notes, "data_dir": data_dir}


def _start_console(settings: ClusterSettings) -> dict[str, Any]:
    from placement.console.actor import start_console

    _require_cluster()
    return start_console(settings.console, settings.cluster_name)


def _start_gateways(settings: ClusterSettings) -> list[dict[str, Any]]:
    from placement.gateway.launching import start_gateways

    _require_cluster()
    return start_gateways(settings)


def _require_cluster() -> None:
    if not any(name.startswith("nameserver-") for name in running()):
        raise ClusterNotFoundError("this Ray cluster does not run raymq: start it with `raymq up`")


def _changes(plan: Plan, before: Sequence[str], roots: Mapping[str, str]) -> list[str]:
    """Return sentences that describe what a start has changed in a running raymq, and which requested settings it did
    not change.

    `before`: names of the actors that ran before the start. `roots`: the directories of the stores on this node, by
    storage actor.
    """
    began = sorted(set(running()) - set(before))
    notes = [
        f"raymq was already running: started {', '.join(began)}"
        if began
        else "raymq was already running: nothing was started"
    ]
    unlike = differences(plan, before, roots)
    notes += unlike
    notes.append(
        ("to change that" if unlike else "to apply changes of raymq.yaml")
        + ": raymq down, then raymq up; `raymq config set` changes live settings at once"
    )
    return notes


def _log_bytes(plan: Plan, nodes: Sequence[Node]) -> dict[str, int]:
    """Return the size in bytes of the log of each store in the plan, by the name of the storage actor. The size is 0 if
    the actor's node has no such store."""
    stores = {node.node_id: node.stores for node in nodes}
    return {
        str(storage.name): stores.get(storage.node_id, {}).get(storage.settings.store_path_root_dir.name, 0)
        for storage in plan.storages
    }


def _progress(step: str) -> None:
    _write_answer(progress=step)


def _write_answer(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
