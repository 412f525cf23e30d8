"""Answers QueryRoute and QueryAssignment: the queues of a topic, and the queues of one consumer."""

from __future__ import annotations

from dataclasses import dataclass

from raymq.common.names import is_internal_topic
from raymq.common.protocol.group import GroupConfig, is_ordered
from raymq.common.protocol.route import TopicRoute
from raymq.gateway.calls import CallContext, Handlers
from raymq.gateway.clients.access import GatewayAccess, consumes, creates, sees
from raymq.gateway.convert.names import group_of, namespace_of, topic_of
from raymq.gateway.convert.routes import assignments_of, check_endpoints, endpoints_of, queues_of
from raymq.gateway.convert.statuses import ok
from raymq.gateway.service.answers import answered, namespace_header
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.wire.messages import (
    Endpoints,
    QueryAssignmentRequest,
    QueryAssignmentResponse,
    QueryRouteRequest,
    QueryRouteResponse,
)
from raymq.gateway.wire.table import SERVICE


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The address of a gateway. `advertise`: the address that clients shall use, if it is not the address that they
    used first; None for no such address."""

    host: str
    port: int
    advertise: tuple[str, int] | None = None

    def endpoints(self, asked: Endpoints) -> Endpoints:
        """Return the endpoints to which a client sends its next calls.

        They are the advertised ones, or the endpoints that the client used (`asked`), or else the gateway's own. So
        clients behind a load balancer or a forwarded port keep their way. Raises CallRefusedError if the client's
        endpoints are not legal.
        """
        if self.advertise is not None:
            return endpoints_of(*self.advertise)
        if not asked.addresses:
            return endpoints_of(self.host, self.port)
        check_endpoints(asked)
        return asked


class RouteCalls:
    """The calls about routes. `address`: the gateway's address, which a caller may change."""

    def __init__(self, cluster: GatewayCluster, access: GatewayAccess, address: GatewayAddress) -> None:
        self._cluster, self._access, self.address = cluster, access, address

    def handlers(self) -> Handlers:
        return {
            f"/{SERVICE}/QueryRoute": answered(
                self._access, QueryRouteRequest, self._query_route, lambda status, _: QueryRouteResponse(status=status)
            ),
            f"/{SERVICE}/QueryAssignment": answered(
                self._access,
                QueryAssignmentRequest,
                self._query_assignment,
                lambda status, _: QueryAssignmentResponse(status=status),
                at_once=self._known_assignment,
            ),
        }

    async def _query_route(self, call: CallContext, request: QueryRouteRequest) -> QueryRouteResponse:
        namespace = namespace_of(request.topic, namespace_header(call))
        topic = topic_of(namespace, request.topic)
        self._access.require(call, sees(topic))
        endpoints = self.address.endpoints(request.endpoints)
        may_create = not is_internal_topic(topic) and self._access.may(call, creates(topic))
        route = await self._cluster.route(topic, create=may_create)
        return QueryRouteResponse(status=ok(), message_queues=queues_of(route, request.topic, endpoints))

    async def _query_assignment(self, call: CallContext, request: QueryAssignmentRequest) -> QueryAssignmentResponse:
        topic, group = self._consumed(call, request)
        route, config = await self._cluster.route(topic), await self._cluster.recent_group_config(group)
        return self._assignment(request, route, config)

    def _known_assignment(self, call: CallContext, request: QueryAssignmentRequest) -> QueryAssignmentResponse | None:
        """Return the answer if nobody must be asked: each push consumer asks every 5 s."""
        topic, group = self._consumed(call, request)
        route, config = self._cluster.known_route(topic), self._cluster.known_group_config(group)
        return None if route is None or config is None else self._assignment(request, route, config)

    def _consumed(self, call: CallContext, request: QueryAssignmentRequest) -> tuple[str, str]:
        """Return the stored names of a request's topic and group. Raises AccessDeniedError if the call's user may not
        consume them."""
        namespace = namespace_of(request.topic, namespace_header(call))
        topic, group = topic_of(namespace, request.topic), group_of(namespace, request.group)
        self._access.require(call, *consumes(group, topic))
        return topic, group

    def _assignment(
        self, request: QueryAssignmentRequest, route: TopicRoute, config: GroupConfig
    ) -> QueryAssignmentResponse:
        endpoints = self.address.endpoints(request.endpoints)
        ordered = is_ordered(config, route.attributes.mapping())
        found = assignments_of(route, request.topic, endpoints, ordered=ordered)
        return QueryAssignmentResponse(status=ok(), assignments=found)
