"""GatewayService composes the families of calls. Its table of handlers is all that a server needs."""

from __future__ import annotations

from raymq.gateway.calls import Handlers
from raymq.gateway.service.client_calls import ClientCalls
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.service.connected_clients import ConnectedClients
from raymq.gateway.service.receive_calls import ReceiveCalls
from raymq.gateway.service.route_calls import GatewayAddress, RouteCalls
from raymq.gateway.service.send_calls import SendCalls


class GatewayService:
    """The service of one gateway process. `clients`: the clients that the process serves."""

    def __init__(self, cluster: GatewayCluster, address: GatewayAddress) -> None:
        self.clients = ConnectedClients()
        self._routes = RouteCalls(cluster, address)
        self._families = (self._routes, ClientCalls(cluster, self.clients), SendCalls(cluster), ReceiveCalls(cluster))

    def handlers(self) -> Handlers:
        """Return the handler of each call that the gateway answers, by path."""
        return {path: handler for family in self._families for path, handler in family.handlers().items()}

    def moved(self, address: GatewayAddress) -> None:
        """Change the gateway's address, after a server has chosen the port."""
        self._routes.address = address
