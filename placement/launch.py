"""Executes a plan: starts the actors, and waits until they answer.

Starting is idempotent: actors that already run are left as they are. Each step has a deadline. If a step of a start
fails, the actors that this start has created are stopped again, so a failed start leaves no new actors.

A separate program runs this module (placement.launcher_main), because Ray gives actors the import path of the program
that created them. A user's program may have a folder called `storage`, which would hide raymq's package of the same
name.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.access.authenticated_server import access_for
from actors.broker.actor import BrokerActor
from actors.nameserver import NameServerActor
from actors.rebalance import start_rebalance
from placement.actor_lifecycle import end_actor, start_storage, stop_actors
from placement.controller import ControllerActor
from placement.inventory import head_node_id, running
from placement.plan import Plan
from placement.specs import ControllerSettings
from raymq.client.cluster.launcher import ProgressCallback
from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.names import CONTROLLER
from raymq.remoting.actor_ref import ActorRef, raymq_errors

SERVERS_READY_TIMEOUT_S: Final = 120.0
"""Seconds within which all actors must answer after a start. Opening a store may require the recovery of gigabytes of
log."""
LAUNCH_CALL_TIMEOUT_S: Final = 10.0
NO_LOGS: Final[Mapping[str, int]] = {}


def start(
    plan: Plan,
    progress: ProgressCallback = lambda step: None,
    timeout_s: float = SERVERS_READY_TIMEOUT_S,
    *,
    log_bytes: Mapping[str, int] = NO_LOGS,
) -> None:
    """Start the planned actors that do not run yet, and return when every actor answers. `log_bytes`: the sizes of the
    stores' logs by storage actor, which progress messages show.

    If the start fails, stops every actor that this call started, and raises the error (StoreLockedError, StoreError,
    RequestTimeoutError …).
    """
    before = set(running())
    try:
        with raymq_errors("the start of raymq's actors"):
            _start(plan, progress, time.monotonic() + timeout_s, log_bytes)
    except BaseException:
        stop_actors(progress, only=[name for name in running() if name not in before])
        raise


def _start(plan: Plan, progress: ProgressCallback, deadline_s: float, log_bytes: Mapping[str, int]) -> None:
    progress("starting the NameServer")
    on_head = NodeAffinitySchedulingStrategy(head_node_id(), soft=False)
    for index, nameserver in enumerate(plan.nameservers):
        NameServerActor.options(
            name=str(nameserver.name), get_if_exists=True, scheduling_strategy="SPREAD" if index else on_head
        ).remote(
            str(nameserver.kv_path),
            [broker.broker_name for broker in plan.brokers],
            name=str(nameserver.name),
            metrics=plan.metrics,
            **access_for(str(nameserver.name)),
        )
    progress("opening the stores")
    for storage in plan.storages:
        start_storage(storage)
    for storage in plan.storages:
        progress(f"opening the stores: {storage.name}{_recovery(log_bytes.get(str(storage.name), 0))}")
        _wait(str(storage.name), "describe", deadline_s)
    if plan.controller is not None:
        progress("starting the Controller")
        _end_outdated(plan.controller)
        # The Controller must run on the head node, whose disk has its journal.
        ControllerActor.options(name=CONTROLLER, get_if_exists=True, scheduling_strategy=on_head).remote(
            plan.controller, **access_for(CONTROLLER)
        )
        _wait(CONTROLLER, "status", deadline_s)
    rebalances = start_rebalance(
        plan.rebalance_servers, [nameserver.name for nameserver in plan.nameservers], plan.metrics
    )
    progress("starting the brokers")
    for broker in plan.brokers:
        BrokerActor.options(name=broker.broker_name, get_if_exists=True).remote(
            broker, **access_for(broker.broker_name)
        )
    for broker in plan.brokers:
        _wait(broker.broker_name, "groups", deadline_s)
    for name in rebalances:
        _wait(name, "status", deadline_s)
    progress("waiting for the brokers to register")
    expected = {broker.broker_name for broker in plan.brokers}
    for nameserver in plan.nameservers:
        server = ActorRef(str(nameserver.name))
        while missing := expected - set(server.call("brokers", timeout_s=max(0.1, deadline_s - time.monotonic()))):
            if time.monotonic() > deadline_s:
                raise RequestTimeoutError(
                    f"the registration of {', '.join(sorted(missing))} at {nameserver.name}", SERVERS_READY_TIMEOUT_S
                )
            time.sleep(0.05)


def store_roots_here() -> dict[str, str]:
    """Return the directories of the stores that run on this process's node, by the name of the storage actor. Stores
    that do not answer are omitted."""
    here, roots = ray.get_runtime_context().get_node_id(), {}
    for name in (name for name in running() if name.startswith("storage-")):
        try:
            described = ActorRef(name).call("describe", timeout_s=LAUNCH_CALL_TIMEOUT_S)
        except RaymqError:
            continue  # skip the store: `raymq status` reports a store that does not answer
        if described.node_id == here:
            roots[name] = described.root
    return roots


def _recovery(log_bytes: int) -> str:
    """Return the size of a store's log as the end of a progress message; empty below 1 MiB. The user can estimate the
    recovery time from the log size."""
    return f", a log of {log_bytes >> 20:,} MiB" if log_bytes >> 20 else ""


def _end_outdated(settings: ControllerSettings) -> None:
    """End the running Controller if its settings differ from `settings`. The next Controller continues from the journal
    before the leases of the masters expire."""
    if CONTROLLER in running() and ActorRef(CONTROLLER).call("settings", timeout_s=LAUNCH_CALL_TIMEOUT_S) != settings:
        end_actor(CONTROLLER)


def _wait(name: str, method: str, deadline_s: float) -> None:
    actor = ActorRef(name)
    while True:
        try:
            actor.call(method, timeout_s=max(0.1, deadline_s - time.monotonic()))
            return
        except ServiceNotAvailableError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)
