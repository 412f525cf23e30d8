"""The endpoint of live tails: the new messages of a topic as server-sent events.

    event: message    a message of the topic
    event: skipped    the number of messages that the viewer does not get
    event: problem    why the topic cannot be read now, or why the stream ends

A tail joins no group and leases nothing: it begins at the end of the topic, and a viewer that reconnects misses the
messages between. Comments keep silent connections open. The user's rights and quota are checked at each event, so a
tail ends soon after its user has lost the right.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from raymq.client.admin.live_tails import TailEvent, Tails, Viewer
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import BodyUnreadableError, QuotaExceededError, RaymqError, ServiceNotAvailableError
from raymq.common.message import MessageExt
from raymq.gateway.calls import CallContext
from raymq.gateway.clients.access import GatewayAccess, reads
from raymq.gateway.convert.names import namespace_of, subscription_of, topic_of
from raymq.gateway.convert.outgoing import outgoing
from raymq.gateway.convert.statuses import CallRefusedError, status_of
from raymq.gateway.http.answers import as_problem, stored_message
from raymq.gateway.http.calls import NAMESPACE, call_of
from raymq.gateway.http.requests import only
from raymq.gateway.http.shapes import Skipped
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, FilterType
from raymq.remoting.access.policies import Need

HTTP_TAILS_MAX: Final = 100
"""Maximum number of tails that one gateway process serves at the same time."""
HTTP_TAIL_RATE: Final = 500
"""Maximum number of messages per second of the tails of one topic."""
EVENT_STREAM: Final = "text/event-stream"


class TailCalls:
    """The endpoint of live tails. `tails`: the open tails of this process."""

    def __init__(self, cluster: GatewayCluster, access: GatewayAccess, tails: Tails) -> None:
        self._cluster, self._access, self._tails = cluster, access, tails

    async def tail(self, request: Request) -> Response:
        """Stream the messages of a topic that arrive from now on."""
        only(request.query_params, "tags")
        call = self._access.authenticated(call_of(request))
        resource = wire.Resource(name=request.path_params["topic"])
        topic = topic_of(namespace_of(resource, call.metadata[NAMESPACE]), resource)
        need = reads(topic)
        self._access.require(call, need)
        expression = wire.FilterExpression(type=FilterType.TAG, expression=request.query_params.get("tags", "*"))
        subscription = subscription_of(topic, expression)
        await self._cluster.route(topic)
        if request.method == "HEAD":  # an answer without a body would hold a viewer's place for ever
            return Response(media_type=EVENT_STREAM)
        viewer = self._tails.open(topic, lambda message: _is_wanted(message, subscription))
        return StreamingResponse(
            self._events(call, need, topic, resource, viewer),
            media_type=EVENT_STREAM,
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},  # nginx else buffers the events
        )

    async def _events(
        self, call: CallContext, need: Need, topic: str, resource: wire.Resource, viewer: Viewer
    ) -> AsyncIterator[bytes]:
        try:
            yield b": connected\n\n"
            async for event in viewer.events():
                self._access.require(call, need)
                if event is None:
                    yield b": still there\n\n"
                    continue
                for data in self._shown(call, resource, event):
                    yield data
        except RaymqError as error:
            yield _problem(error)
        finally:
            self._tails.leave(topic, viewer)

    def _shown(self, call: CallContext, resource: wire.Resource, event: TailEvent) -> Iterator[bytes]:
        """Yield the events of one update, each when the former one is written, and charge its messages to the user."""
        try:
            allowed = self._access.portion(call, len(event.messages)) if event.messages else 0
        except QuotaExceededError:
            allowed = 0
        for message in event.messages[:allowed]:
            try:
                data = msgspec.json.encode(stored_message(outgoing(message, resource)))
            except BodyUnreadableError as error:
                yield _problem(CallRefusedError(Code.MESSAGE_CORRUPTED, str(error)))
                continue
            self._access.charge_consumed(call, len(data), 1)
            yield _event("message", data)
        if skipped := event.skipped + len(event.messages) - allowed:
            yield _event("skipped", msgspec.json.encode(Skipped(count=skipped)))
        if event.error:
            yield _problem(ServiceNotAvailableError(event.error))


def _is_wanted(message: MessageExt, subscription: Subscription) -> bool:
    return subscription.matches(message.tags)


def _problem(error: BaseException) -> bytes:
    return _event("problem", msgspec.json.encode(as_problem(status_of(error))))


def _event(name: str, data: bytes) -> bytes:
    """Return one server-sent event. JSON has no line end, so one data field is enough."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data)
