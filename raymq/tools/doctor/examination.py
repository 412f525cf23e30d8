"""Takes the doctor's snapshot, runs all checks, and makes the repairs of `raymq doctor --fix`.

Repairs change permissions and create missing directories, on this machine only. Each repair is safe while servers run,
and can be undone by hand. Repairs neither change the content of a file nor delete anything.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

import ray

from raymq.client.cluster.attach import attach_ray
from raymq.client.cluster.launcher import ProgressCallback, launch
from raymq.common.config.cluster import ClusterSettings, data_dir_here
from raymq.common.errors import ClusterNotFoundError, RaymqError
from raymq.common.protocol.status import BrokerReport, ClusterStatus
from raymq.tools.doctor.checks.cluster_checks import CLUSTER_CHECKS
from raymq.tools.doctor.checks.gateway_checks import GATEWAY_CHECKS
from raymq.tools.doctor.checks.machine_checks import MACHINE_CHECKS
from raymq.tools.doctor.checks.metrics_checks import METRICS_CHECKS
from raymq.tools.doctor.checks.node_checks import NODE_CHECKS
from raymq.tools.doctor.collect.cluster import collect_cluster, collect_ports, collect_prometheus
from raymq.tools.doctor.collect.gateways import collect_gateways, gateway_port_error
from raymq.tools.doctor.collect.machine import collect_machine, readable_by_others
from raymq.tools.doctor.collect.nodes import NodeTask, collect_nodes, servers_with_lanes
from raymq.tools.doctor.facts import ClusterFacts, DoctorSnapshot, MachineFacts
from raymq.tools.doctor.findings import Finding, run_checks

CHECKS = (*MACHINE_CHECKS, *NODE_CHECKS, *CLUSTER_CHECKS, *GATEWAY_CHECKS, *METRICS_CHECKS)


def examine(snapshot: DoctorSnapshot) -> list[Finding]:
    """Run all checks of `raymq doctor` on a snapshot and return their findings."""
    return run_checks(CHECKS, snapshot)


def take_snapshot(
    settings: ClusterSettings, address: str | None, prometheus: str | None, progress: ProgressCallback
) -> DoctorSnapshot:
    """Collect facts about this machine, about the Ray cluster at `address`, and about raymq in this cluster. The
    cluster and raymq need not run.

    `settings` contains the store directories to use if raymq does not run, and the limits of disk usage. If a server is
    missing or does not answer, no error is raised: the snapshot contains the error.
    """
    named = None if prometheus is None else collect_prometheus(prometheus)
    try:
        attached = attach_ray(address)
    except ClusterNotFoundError as error:
        progress("looking at this machine")
        machine, reason = _machine(settings, ClusterStatus()), str(error)
        expected = bool(address or os.environ.get("RAY_ADDRESS"))
        return DoctorSnapshot(
            machine,
            ray_error=reason,
            named=expected,
            cluster_error=reason,
            prometheus=named,
            gateway_port_error=gateway_port_error(settings.gateway),
        )
    try:
        return _with_ray(settings, named, progress)
    finally:
        if attached:
            ray.shutdown()


def _with_ray(settings: ClusterSettings, prometheus: Any, progress: ProgressCallback) -> DoctorSnapshot:
    progress("asking the servers")
    status = _status(ray.get_runtime_context().gcs_address)
    progress("looking at this machine")
    machine = _machine(settings, status)
    progress("looking at the nodes")
    task = NodeTask(
        tuple(map(str, _store_directories(status))),
        str(settings.data_dir),
        *_ratios(settings),
        tuple(servers_with_lanes(status.actors)),
        {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()},
    )
    nodes = tuple(collect_nodes(task))
    ports = tuple(collect_ports(ray.nodes()))
    progress("looking at the consumer groups")
    cluster = _cluster(settings, status)
    here = ray.util.get_node_ip_address()
    missing = "" if cluster else "this Ray cluster runs no raymq"
    return DoctorSnapshot(
        machine,
        nodes,
        cluster=cluster,
        cluster_error=missing,
        ports=ports,
        prometheus=prometheus,
        metrics_enable=settings.metrics.enable,
        gateways=collect_gateways(status, here),
        gateway_port_error=gateway_port_error(settings.gateway, status.gateways),
    )


def _status(gcs_address: str) -> ClusterStatus:
    try:
        return ClusterStatus.of(launch("status", gcs_address))
    except RaymqError as error:
        return ClusterStatus(brokers=(BrokerReport("raymq status", str(error)),))


def _cluster(settings: ClusterSettings, status: ClusterStatus) -> ClusterFacts | None:
    from raymq.client.client import connect

    if not status.actors:
        return ClusterFacts(status) if status.brokers else None
    try:
        with connect() as client:
            return collect_cluster(client, status, settings.store.file_reserved_time_hours * 3_600_000)
    except RaymqError as error:
        return ClusterFacts(status, groups_error=str(error))


def _store_directories(status: ClusterStatus) -> list[Path]:
    """Return the directories that contain the running stores, on all nodes."""
    roots = {str(Path(store.root).parent) for store in status.stores if not store.error}
    return [Path(root) for root in sorted(roots)]


def _machine(settings: ClusterSettings, status: ClusterStatus) -> MachineFacts:
    directories = [path for path in _store_directories(status) if path.is_dir()]
    if not directories:
        directories = [data_dir_here(settings.data_dir), *settings.store.store_path_commit_log]
    return collect_machine(directories, *_ratios(settings))


def _ratios(settings: ClusterSettings) -> tuple[float, float]:
    store = settings.store
    return store.disk_max_used_space_ratio / 100, store.disk_space_warning_level_ratio / 100


PRIVATE_DIRECTORY: Final = 0o700


def fix(machine: MachineFacts) -> list[str]:
    """Make the safe repairs that the facts about `machine` require. Returns one line for each repair, including failed
    repairs."""
    done = []
    if machine.token_mode is not None and machine.token_mode & 0o077:
        done.append(_make_private(Path(machine.token_path)))
    for directory in machine.directories:
        path = Path(directory.path)
        if not directory.exists and not directory.error:
            done.append(_make_directory(path))
        elif directory.readable_count:
            done += _make_all_private(path)
    return done


def _make_directory(path: Path) -> str:
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    except OSError as error:
        return f"could not create {path}: {error}"
    return f"created {path}, mode {PRIVATE_DIRECTORY:04o}"


def _make_private(path: Path) -> str:
    """Remove the permissions of other users from a file or directory."""
    try:
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(before & 0o700)
    except OSError as error:
        return f"could not change the mode of {path}: {error}"
    return f"{path}: mode {before:04o} is {before & 0o700:04o} now"


def _make_all_private(root: Path) -> list[str]:
    """Remove the permissions of other users from a directory and all files below it.

    Returns one line for all changes, and one line for each file whose mode could not be changed.
    """
    lines = [_make_private(path) for path in list(readable_by_others(root))]
    failed = [line for line in lines if line.startswith("could not")]
    changed = len(lines) - len(failed)
    return ([f"{root}: other users may no longer use {changed:,} files and directories"] if changed else []) + failed
