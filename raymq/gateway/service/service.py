"""GatewayService composes the families of calls. Its table of handlers is all that a server needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from raymq.gateway.calls import Handlers
from raymq.gateway.clients.access import GatewayAccess
from raymq.gateway.clients.command_streams import CommandStreams
from raymq.gateway.clients.connected_clients import ConnectedClients
from raymq.gateway.service.client_calls import ClientCalls
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.service.measured_calls import CallFigures, measured
from raymq.gateway.service.pull_calls import PullCalls
from raymq.gateway.service.receive_calls import ReceiveCalls
from raymq.gateway.service.route_calls import GatewayAddress, RouteCalls
from raymq.gateway.service.send_calls import SendCalls
from raymq.gateway.service.transaction_calls import TransactionCalls
from raymq.telemetry.metrics.reporter import Reporter

TICK_S: Final = 5.0
"""Time in seconds between two searches for leases to renew and clients that have gone."""
LAG_S: Final = 0.5
"""Time in seconds between two measurements of the event loop's lag."""
LIMITS_VALID_S: Final = 60.0
"""Time in seconds after which a gateway asks the stores for their limits again."""


class GatewayService:
    """The service of one gateway process. `clients`: the clients that the process serves. `figures`: the figures of
    their calls."""

    def __init__(
        self,
        cluster: GatewayCluster,
        address: GatewayAddress,
        access: GatewayAccess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clients, self._cluster, self._clock = ConnectedClients(), cluster, clock
        self.figures = CallFigures()
        self._limits_due_s = 0.0
        streams = CommandStreams()
        self._routes = RouteCalls(cluster, access, address)
        self._receives = ReceiveCalls(cluster, access, self.clients, clock)
        self._transactions = TransactionCalls(cluster, access, streams)
        self._client_calls = ClientCalls(cluster, access, self.clients, streams, self._receives, clock)
        self._sends = SendCalls(cluster, access, self._transactions, clock)
        pulls = PullCalls(cluster, access)
        self._families = (self._routes, self._client_calls, self._sends, self._transactions, self._receives, pulls)

    def handlers(self) -> Handlers:
        """Return the handler of each call that the gateway answers, by path."""
        handlers = {path: handler for family in self._families for path, handler in family.handlers().items()}
        return measured(handlers, self.figures)

    async def run(self) -> None:
        """Renew leases, forget clients that have gone, and ask producers about transactions, until the task is
        cancelled. Measures the event loop's lag between times."""
        await self.tick()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._transactions.run())
            while True:
                for _ in range(round(TICK_S / LAG_S)):
                    await self.figures.measured_sleep(LAG_S)
                await self.tick()

    async def tick(self) -> None:
        """Renew leases, and forget clients and sends of the past: all that `run` does every TICK_S."""
        for client_id in self.clients.expire(self._clock()):
            self._client_calls.gone(client_id)
        self._sends.expire()
        now_s = self._clock()
        if now_s >= self._limits_due_s:
            self._limits_due_s = now_s + LIMITS_VALID_S
            await self._cluster.refresh_limits()
        self.figures.renewed += await self._receives.renew_due()

    def report(self, reporter: Reporter) -> None:
        """Report the metrics of the gateway. Any thread may call this method."""
        self.figures.report(reporter, self.clients)

    def end_receives(self) -> None:
        """Answer all receives that wait for a message at once, without a message. Call this method before the server
        stops: its clients then wait at another gateway."""
        self._receives.end_receives()

    async def poll_checks(self) -> None:
        """Ask producers once about transactions without an outcome."""
        await self._transactions.poll()

    def moved(self, address: GatewayAddress) -> None:
        """Change the gateway's address, after a server has chosen the port."""
        self._routes.address = address
