"""Starts gateways on a test's cluster as `raymq gateway start` does, kills their processes, and stops them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from placement.status import cluster_status
from raymq.client.cluster.launcher import launch
from raymq.common.config.cluster import load_settings
from tests.support.history.waiting import eventually

HOST = "127.0.0.1"
RESTART_S = 120.0


def free_port() -> int:
    """Return a TCP port that no program uses now."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    return port


class RunningGateway:
    """One gateway process, which listens at `endpoints`."""

    def __init__(self, port: int) -> None:
        self.endpoints = f"{HOST}:{port}"

    def pid(self) -> int:
        """Return the process id of the gateway; 0 while it does not serve."""
        return next((one.pid for one in cluster_status().gateways if not one.error), 0)

    def kill(self) -> tuple[int, int]:
        """SIGKILL the gateway's process, and wait until another process serves. Returns both times in ms since 1970."""
        killed = self.pid()
        assert killed, "no gateway serves"
        killed_ms = time.time_ns() // 1_000_000
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: self.pid() not in (0, killed), "another gateway process", RESTART_S)
        return killed_ms, time.time_ns() // 1_000_000


@contextmanager
def running_gateway(folder: Path, options: str = "", more: str = "") -> Iterator[RunningGateway]:
    """Start one gateway on the cluster of this process, and yield it. At the end, the gateway is stopped.

    `folder`: for the settings file. `options`: further settings of the section `gateway`, each with a comma before it.
    `more`: the other sections of the settings.
    """
    port, config = free_port(), folder / "raymq.yaml"
    config.write_text(f"gateway: {{port: {port}{options}}}\n{more}")
    address = ray.get_runtime_context().gcs_address
    try:
        launch("gateways", address, load_settings(config))
        yield RunningGateway(port)
    finally:
        launch("stop_gateways", address)


def make_gateway_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for HOST that signs itself, with the `openssl` command. Returns the files of the certificate
    and of its key."""
    certificate, key = folder / "gateway.pem", folder / "gateway.key"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}")
    command = ["openssl", "req", "-x509", *curve, *names, "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
