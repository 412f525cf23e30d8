"""The actors `gateway-NODE-NUMBER`: servers for programs outside Ray, each in an event loop of its own thread.

They speak RocketMQ 5's gRPC protocol and, if the settings have a port for it, HTTP.

A gateway has no state that a client needs. So any process may be killed at any time, Ray restarts it at the same port,
and a client's next call may reach another process. No server of raymq waits for a gateway.

The modules for HTTP and web hooks are imported only if the settings ask for them: their packages take 20 MiB.

If a gateway cannot start, it tries again until it can: the cluster may be starting, or another program may still use
the port. Until then `status` raises the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray

from actors.access.authenticated_server import authenticated_server
from actors.actor_class import actor_class
from actors.metrics_thread import MetricsThread
from actors.options import PERSISTENT
from placement.actor_lifecycle import check_address
from placement.gateway.shared_port import shared_port
from placement.inventory import running
from raymq.client.client import connect
from raymq.common.config.gateway import GatewayOptions, GatewaySettings
from raymq.common.config.values import is_loopback
from raymq.common.errors import ConfigError, RaymqError, ServiceNotAvailableError
from raymq.common.names import GATEWAY_PREFIX
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.front.certificates import CertificateFiles
from raymq.gateway.front.server import GrpcFront
from raymq.gateway.service.cluster import cluster_of
from raymq.gateway.service.measured_calls import language_name
from raymq.gateway.service.route_calls import GatewayAddress
from raymq.gateway.service.service import GatewayService
from raymq.gateway.wire.parsing import SEND_BYTES_MAX
from raymq.telemetry.metrics.reporter import Reporter

if TYPE_CHECKING:
    from raymq.gateway.http.server import HttpFront
    from raymq.gateway.webhooks.deliveries import WebhookDeliveries

GATEWAY_SEND_TIMEOUT_S: Final = 10.0
"""Longest time in seconds that a gateway waits for a store. Usually a call's own deadline is shorter."""
GATEWAY_RETRY_S: Final = 2.0
"""Time in seconds from a failed start to the next."""
FIRST_START_S: Final = 50.0
"""Time in seconds that `describe` waits for the first start to succeed or to fail."""
STOP_S: Final = 20.0
"""Time in seconds that `close` waits for the event loop. Running calls have 5 s of it."""
COUNT_INTERVAL_S: Final = 10.0
"""Time in seconds between two counts of the gateway processes, which share each user's quotas."""

logger = logging.getLogger(__name__)


class Gateway:
    """The class of the gateway actors: one process of the gateway on one node."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._failure: RaymqError | None = ServiceNotAvailableError("the gateway is starting")
        self._tried = threading.Event()
        """Set after the first start has succeeded or failed."""
        self._logged = ""
        self._service: GatewayService | None = None
        self._webhooks: WebhookDeliveries | None = None
        self._processes = 1
        """Number of gateway processes of the cluster, at the last count."""
        self._stopping = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        self._metrics = MetricsThread(settings.metrics, "gateway", str(settings.name), self._report)

    def describe(self) -> dict[str, Any]:
        """Return the status of the gateway after its first start. Raises the start's error if it failed: ConfigError or
        ServiceNotAvailableError."""
        self._tried.wait(FIRST_START_S)
        return self.status()

    def settings(self) -> GatewaySettings:
        """Return the settings with which the gateway was started."""
        return self._settings

    def check(self, settings: GatewaySettings) -> None:
        """Raise the error with which a gateway with other settings would not start on this node, in place of this one:
        ConfigError or ServiceNotAvailableError."""
        _check_on_node(settings.options, self._settings.options, has_users=authenticated_server() is not None)

    def status(self) -> dict[str, Any]:
        """Return the gateway's address, and its clients. Raises the reason while the gateway does not serve."""
        failure, service = self._failure, self._service
        if failure is not None:
            # without its traceback, which each raise would make longer
            raise failure.with_traceback(None)
        options = self._settings.options
        clients = {} if service is None else service.clients.by_language()
        webhooks = self._webhooks
        return {
            "node": self._settings.node,
            "listens": _address(options.host, options.port),
            "http": _address(options.host, options.http_port) if options.http_port else "",
            "tls": options.tls_cert is not None,
            "pid": os.getpid(),
            "clients": {language_name(number): count for number, count in sorted(clients.items())},
            "streams": 0 if service is None else service.clients.streams(),
            "webhook_error": "" if webhooks is None else webhooks.key_error(),
        }

    def close(self) -> None:
        """Refuse new calls, let running calls end, and disconnect from the cluster. Returns within STOP_S."""
        self._metrics.close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_S)

    def _report(self, reporter: Reporter) -> None:
        """Report the metrics of the calls, once the gateway serves."""
        service, webhooks = self._service, self._webhooks
        if service is not None:
            service.report(reporter)
        if webhooks is not None:
            webhooks.report(reporter)

    # The methods below run in the thread of the event loop.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve_always())
        finally:
            self._loop.close()

    async def _serve_always(self) -> None:
        """Serve until the gateway is closed. After a failure, start again."""
        while not self._stopping.is_set():
            try:
                await self._serve()
            except RaymqError as error:
                self._failed(error)
            # the thread goes on: nobody else would start the gateway again
            except Exception as error:
                self._failed(ServiceNotAvailableError(f"the gateway ended with an unexpected error: {error!r}"), error)
            try:
                async with asyncio.timeout(GATEWAY_RETRY_S):
                    await self._stopping.wait()
            except TimeoutError:
                continue

    def _failed(self, error: RaymqError, cause: Exception | None = None) -> None:
        """Show an error in the status, and log each error once. `cause`: an unexpected error, for the log."""
        if str(error) != self._logged:
            self._logged = str(error)
            logger.warning("the gateway does not serve, and tries again: %s", error, exc_info=cause)
        self._failure = error
        self._tried.set()

    async def _serve(self) -> None:
        """Start, serve until the gateway is closed, then stop: first the server, then the clients. Raises the error of
        a start that failed, after everything that was started has stopped again."""
        options = self._settings.options
        server = authenticated_server()
        _check_encrypted(options, has_users=server is not None)
        async with AsyncExitStack() as stack:
            for port in _held_ports(self._settings):
                await asyncio.to_thread(port.__enter__)
                stack.push_async_callback(asyncio.to_thread, port.__exit__, None, None, None)
            # a gateway adds its clients' namespaces itself
            client = await asyncio.to_thread(connect, namespace="")
            stack.push_async_callback(asyncio.to_thread, client.close)
            producer = await stack.enter_async_context(
                client.async_producer("gateway", send_timeout_s=GATEWAY_SEND_TIMEOUT_S)
            )
            cluster = cluster_of(client, producer, GATEWAY_SEND_TIMEOUT_S)
            stack.callback(cluster.close)
            stack.push_async_callback(cluster.finish)
            address = GatewayAddress(options.host, options.port, options.advertised)
            state = None if server is None else lambda: server.authorizer.state
            access = GatewayAccess(state, gateways=lambda: self._processes)
            service = GatewayService(cluster, address, access)
            webhooks: WebhookDeliveries | None = None
            if options.webhook_hosts:
                from raymq.gateway.webhooks.deliveries import deliveries_of

                webhooks = deliveries_of(client, cluster, options)
                stack.push_async_callback(webhooks.close)
            shares_port = options.processes > 1
            front = GrpcFront(service.handlers(), request_bytes_max=SEND_BYTES_MAX, shares_port=shares_port)
            fronts: list[GrpcFront | HttpFront] = [front]
            stack.push_async_callback(_stop, fronts)
            # Receives end in the same turn of the event loop in which the server refuses new ones. So no client waits
            # at a gateway that stops.
            stack.callback(service.end_receives)
            await front.start(options.host, options.port, _certificate(options))
            if options.http_port:
                from raymq.gateway.http.app import http_front_of

                http = http_front_of(client, service.handlers(), cluster, access, webhooks, shares_port=shares_port)
                fronts.append(http)
                await http.start(options.host, options.http_port, _certificate(options))
            self._service, self._webhooks, self._failure, self._logged = service, webhooks, None, ""
            self._tried.set()
            await self._until_stopping(service, webhooks, counts=server is not None)

    async def _until_stopping(
        self, service: GatewayService, webhooks: WebhookDeliveries | None, *, counts: bool
    ) -> None:
        """Run the service and the web hooks until the gateway is closed. Raises the error with which one of them ended,
        if it ended. `counts`: True also counts the gateway processes."""
        tasks = [asyncio.ensure_future(service.run()), asyncio.ensure_future(self._stopping.wait())]
        if webhooks is not None:
            tasks.append(asyncio.ensure_future(webhooks.run()))
        if counts:
            tasks.append(asyncio.ensure_future(self._count_processes()))
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            self._failure = ServiceNotAvailableError("the gateway is stopping")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _count_processes(self) -> None:
        """Count the gateway processes of the cluster every COUNT_INTERVAL_S, until the task is cancelled."""
        while True:
            try:
                names = await asyncio.to_thread(running)
                self._processes = max(1, sum(name.startswith(GATEWAY_PREFIX) for name in names))
            # Ray's head may be away for a while: the last count stays
            except Exception as error:
                logger.info("the gateway processes cannot be counted now: %s", error)
            await asyncio.sleep(COUNT_INTERVAL_S)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _stop(fronts: Sequence[GrpcFront | HttpFront]) -> None:
    """Stop all servers at the same time, so that each refuses new calls at once."""
    await asyncio.gather(*(front.stop() for front in fronts))


def _held_ports(settings: GatewaySettings) -> list[AbstractContextManager[None]]:
    """Return the locks on the ports that several processes of the node share."""
    options = settings.options
    if options.processes == 1:
        return []
    ports = [port for port in (options.port, options.http_port) if port]
    return [shared_port(port, settings.name.node_id, Path(tempfile.gettempdir())) for port in ports]


def _check_on_node(options: GatewayOptions, current: GatewayOptions, *, has_users: bool) -> None:
    """Raise the error with which a gateway would not start on this node: ConfigError or ServiceNotAvailableError.

    `current`: the settings of the gateway that runs here, and that ends before the new one starts. `has_users`: True
    if access control is on.
    """
    _check_encrypted(options, has_users=has_users)
    certificate = _certificate(options)
    if certificate is not None:
        certificate.read()
    if options.webhook_secret is not None:
        from raymq.gateway.webhooks.sender import read_keys

        read_keys(options.webhook_secret)
    held = (current.port, current.http_port)
    check_address(options.host, options.port, held=held, setting="gateway.port")
    if options.http_port:
        check_address(options.host, options.http_port, held=held, setting="gateway.http_port")


def _check_encrypted(options: GatewayOptions, *, has_users: bool) -> None:
    """Raise ConfigError if users of other machines would sign calls that anyone on the network can read and repeat."""
    if has_users and options.tls_cert is None and not is_loopback(options.host):
        raise ConfigError(
            f"with access.enable, a gateway at host {options.host} needs TLS: set gateway.tls_cert and "
            "gateway.tls_key, or gateway.host: 127.0.0.1"
        )


def _certificate(options: GatewayOptions) -> CertificateFiles | None:
    """Return the files of the gateway's certificate; None for a gateway without TLS."""
    if options.tls_cert is None or options.tls_key is None:
        return None
    return CertificateFiles(options.tls_cert.expanduser(), options.tls_key.expanduser())


GATEWAY_ACTOR_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 4}
GatewayActor = ray.remote(**GATEWAY_ACTOR_OPTIONS)(actor_class(Gateway))
