"""Starts gateways on a test's cluster as `raymq gateway start` does, kills their processes, and stops them.

`local_gateway` serves in the test's own process instead, where a test can look at what the gateway does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

import raymq
from placement.status import cluster_status
from raymq.client.cluster.launcher import launch
from raymq.common.config.cluster import load_settings
from raymq.gateway.service.cluster import cluster_of
from raymq.gateway.service.service import GatewayService
from tests.support.gateway.gateway_client import ANSWER_S, HOST, served
from tests.support.history.waiting import eventually
from tests.support.ports import free_port

RESTART_S = 120.0
SEND_TIMEOUT_S = 30.0


class RunningGateway:
    """One or several gateway processes, which listen at `endpoints`."""

    def __init__(self, port: int, config: Path) -> None:
        """`config`: the file with the gateway's settings."""
        self.endpoints, self._config = f"{HOST}:{port}", config
        self._address = ray.get_runtime_context().gcs_address

    def start(self) -> None:
        """Start the gateway's processes as `raymq gateway start` does."""
        launch("gateways", self._address, load_settings(self._config))

    def stop(self) -> None:
        """Stop the gateway's processes as `raymq gateway stop` does: running calls end first."""
        launch("stop_gateways", self._address)

    def pid(self) -> int:
        """Return the process id of the gateway; 0 while it does not serve."""
        return next(iter(self.pids()), 0)

    def pids(self) -> list[int]:
        """Return the ids of the processes that serve."""
        return [one.pid for one in cluster_status().gateways if not one.error]

    def servers_of(self, pid: int) -> set[int]:
        """Return the ids of the gateway's processes to which the process `pid` has connections."""
        ends = {ours for ours, theirs in _connections(pid) if f"{HOST}:{theirs}" == self.endpoints}
        return {server for server in self.pids() if any(theirs in ends for _, theirs in _connections(server))}

    def kill(self) -> tuple[int, int]:
        """SIGKILL the gateway's process, and wait until another process serves. Returns both times in ms since 1970."""
        killed = self.pid()
        assert killed, "no gateway serves"
        killed_ms = time.time_ns() // 1_000_000
        os.kill(killed, signal.SIGKILL)
        eventually(lambda: self.pid() not in (0, killed), "another gateway process", RESTART_S)
        return killed_ms, time.time_ns() // 1_000_000


def _connections(pid: int) -> list[tuple[int, int]]:
    """Return the ports of a process's open TCP connections: its own port, and the other end's. Empty if the process has
    ended."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [(one.laddr.port, one.raddr.port) for one in found if one.status == psutil.CONN_ESTABLISHED]


@contextmanager
def running_gateway(folder: Path, options: str = "", more: str = "") -> Iterator[RunningGateway]:
    """Start a gateway on the cluster of this process, and yield it. At the end, the gateway is stopped.

    `folder`: for the settings file. `options`: further settings of the section `gateway`, each with a comma before it.
    `more`: the other sections of the settings.
    """
    port, config = free_port(), folder / "raymq.yaml"
    config.write_text(f"gateway: {{port: {port}{options}}}\n{more}")
    gateway = RunningGateway(port, config)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()


class LocalGateway:
    """A gateway in a thread of this process, which listens at `endpoints`."""

    def __init__(self, port: int, service: GatewayService) -> None:
        self.endpoints, self._service = f"{HOST}:{port}", service
        self._loop, self.stopping = asyncio.get_running_loop(), asyncio.Event()

    def waiting_receives(self) -> int:
        """Return the number of receives that wait for a message."""
        return self._ask(lambda: sum(len(own) for own in self._service._receives._waiting.values()))

    def renewed_leases(self) -> int:
        """Return the number of leases that the gateway renews now."""
        return self._ask(lambda: len(self._service._receives.renewals))

    def renewals(self) -> int:
        """Return how many renewals of a lease have succeeded."""
        return self._ask(lambda: self._service.figures.renewed)

    def stop(self) -> None:
        """Let the gateway stop. Does nothing if it has ended already."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.stopping.set)

    def _ask(self, question: Callable[[], int]) -> int:
        """Call `question` in the thread of the event loop, and return its result."""

        async def asked() -> int:
            return question()

        return asyncio.run_coroutine_threadsafe(asked(), self._loop).result(ANSWER_S)


@contextmanager
def local_gateway(client: raymq.Client) -> Iterator[LocalGateway]:
    """Serve a gateway in a thread of this process, and yield it. At the end, the gateway is stopped, and an error with
    which its service ended is raised."""
    begun: Future[LocalGateway] = Future()
    ended: Future[None] = Future()

    async def serve() -> None:
        async with (
            client.async_producer("gateway", send_timeout_s=SEND_TIMEOUT_S) as producer,
            served(cluster_of(client, producer, SEND_TIMEOUT_S)) as place,
        ):
            running = asyncio.ensure_future(place.service.run())
            gateway = LocalGateway(place.port, place.service)
            begun.set_result(gateway)
            stopping = asyncio.ensure_future(gateway.stopping.wait())
            await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
            place.service.end_receives()
            stopping.cancel()
            if running.done():
                running.result()
            running.cancel()

    def run() -> None:
        try:
            asyncio.run(serve())
        # the thread that waits for the gateway raises each error
        except BaseException as error:
            for future in (begun, ended):
                if not future.done():
                    future.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="gateway", daemon=True).start()
    gateway = begun.result(ANSWER_S)
    try:
        yield gateway
    finally:
        gateway.stop()
        ended.result(ANSWER_S)


def make_gateway_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for HOST that signs itself, with the `openssl` command. Returns the files of the certificate
    and of its key."""
    certificate, key = folder / "gateway.pem", folder / "gateway.key"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    names = ("-subj", f"/CN={HOST}", "-addext", f"subjectAltName=IP:{HOST}")
    command = ["openssl", "req", "-x509", *curve, *names, "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key
