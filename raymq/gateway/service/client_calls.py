"""Answers Heartbeat, NotifyClientTermination and the stream Telemetry, with which clients begin and end.

Clients wait for the answer to their settings before they start. The stream also brings a client the commands that
wait for it, such as checks of transactions (`raymq.gateway.clients.command_streams`).

Python's client opens a broken stream again only with
its next settings, minutes later; until then the heartbeats of such a client are answered OK, because no other call
needs the settings.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Final

from raymq.common.errors import InvalidArgumentError, RaymqError, TopicNotExistError
from raymq.common.protocol.group import GroupConfig, is_ordered
from raymq.gateway.calls import BothStreams, CallContext, Handlers, StreamRefusedError
from raymq.gateway.clients.access import GatewayAccess, consumes, sends
from raymq.gateway.clients.command_streams import TOPICS_MAX, CommandStream, CommandStreams
from raymq.gateway.clients.connected_clients import ConnectedClients
from raymq.gateway.convert.client_settings import check_settings, consumer_settings, producer_settings
from raymq.gateway.convert.names import group_of, namespace_of, subscription_of, topic_of
from raymq.gateway.convert.statuses import ok, status_of
from raymq.gateway.convert.transactions import is_transactional
from raymq.gateway.service.answers import answered, client_id_of, namespace_header
from raymq.gateway.service.client_members import ClientMembers
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.service.receive_calls import ReceiveCalls
from raymq.gateway.wire.enums import ClientType
from raymq.gateway.wire.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    NotifyClientTerminationRequest,
    NotifyClientTerminationResponse,
    Resource,
    Settings,
    TelemetryCommand,
)
from raymq.gateway.wire.parsing import parse_request
from raymq.gateway.wire.table import SERVICE

FIRST_COMMAND_S: Final = 5.0
"""Time in seconds that a client whose stream is refused has for its first command."""


class ClientCalls:
    """The calls about clients. `clients`, `streams`: the clients of this process, and their open streams.
    `receives`: the calls whose waits and leases end with a client."""

    def __init__(
        self,
        cluster: GatewayCluster,
        access: GatewayAccess,
        clients: ConnectedClients,
        streams: CommandStreams,
        receives: ReceiveCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._access, self._clients = cluster, access, clients
        self._streams, self._receives, self._clock = streams, receives, clock
        self._members = ClientMembers(cluster.announcer, access, streams)

    def handlers(self) -> Handlers:
        return {
            f"/{SERVICE}/Heartbeat": answered(
                *(self._access, HeartbeatRequest, self._heartbeat),
                lambda status, _: HeartbeatResponse(status=status),
                at_once=self._beat,
            ),
            f"/{SERVICE}/NotifyClientTermination": answered(
                self._access,
                NotifyClientTerminationRequest,
                self._terminate,
                lambda status, _: NotifyClientTerminationResponse(status=status),
            ),
            f"/{SERVICE}/Telemetry": BothStreams(self._telemetry),
        }

    async def _heartbeat(self, call: CallContext, request: HeartbeatRequest) -> HeartbeatResponse:
        return self._beat(call, request)

    def _beat(self, call: CallContext, request: HeartbeatRequest) -> HeartbeatResponse:
        group = ""
        if request.HasField("group") and request.group.name:
            group = group_of(namespace_of(request.group, namespace_header(call)), request.group)
            self._access.require(call, *consumes(group))
        self._clients.active(client_id_of(call), self._clock(), client_type=request.client_type, group=group)
        return HeartbeatResponse(status=ok())

    async def _terminate(
        self, call: CallContext, request: NotifyClientTerminationRequest
    ) -> NotifyClientTerminationResponse:
        client_id = client_id_of(call)
        self._clients.forget(client_id)
        self.gone(client_id)
        return NotifyClientTerminationResponse(status=ok())

    def gone(self, client_id: str) -> None:
        """End all that the gateway does for a client that has gone: its receives, its leases, its membership."""
        self._receives.client_gone(client_id)
        self._members.gone(client_id)

    async def _telemetry(self, call: CallContext, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Answer each settings of a client, and send the client the commands that wait for it."""
        try:
            client_id_of(call)
            call = self._access.authenticated(call)
            stream = CommandStream(client_id_of(call), call)
        except RaymqError as error:
            # gRPC for Python loses the reason if the stream ends before the client's first write
            await _first_command(requests)
            yield _refusal(error)
            raise StreamRefusedError(str(error)) from None
        reader = asyncio.create_task(self._read(call, stream, requests))
        reader.add_done_callback(lambda done: _end(stream, done))
        try:
            while (command := await stream.next()) is not None:
                yield command.SerializeToString()
            await reader
        except StreamRefusedError as error:
            yield _refusal(error.__cause__ or error)
            raise
        finally:
            reader.cancel()
            self._streams.closed(stream)
            if stream.is_open:
                self._clients.stream_closed(stream.client_id, self._clock())

    async def _read(self, call: CallContext, stream: CommandStream, requests: AsyncIterator[bytes]) -> None:
        """Read the commands of a client. Raises StreamRefusedError at a command that breaks a rule."""
        async for data in requests:
            command = self._parsed(data)
            kind = command.WhichOneof("command")
            if kind == "settings":
                await self._settings(call, stream, command.settings)
            elif kind == "thread_stack_trace":
                stream.answered(command.thread_stack_trace.nonce, command)
            elif kind == "verify_message_result":
                stream.answered(command.verify_message_result.nonce, command)
            elif kind == "verify_message_command":
                # Node's clients refuse the question with the question's own kind
                stream.answered(command.verify_message_command.nonce, command)

    async def _settings(self, call: CallContext, stream: CommandStream, settings: Settings) -> None:
        answer = await self._answer(call, stream, settings)
        if not stream.is_open:
            self._clients.stream_opened(stream.client_id)
            stream.is_open = True
            self._streams.opened(stream)
        await stream.answer(TelemetryCommand(status=ok(), settings=answer))

    @staticmethod
    def _parsed(data: bytes) -> TelemetryCommand:
        try:
            return parse_request(TelemetryCommand, data)
        except RaymqError as error:
            raise StreamRefusedError(str(error)) from error

    async def _answer(self, call: CallContext, stream: CommandStream, settings: Settings) -> Settings:
        """Return the answer to a client's settings, and register the client. Raises StreamRefusedError if the settings
        break a rule."""
        try:
            check_settings(settings)
            topics: dict[str, Resource] = {}
            if settings.WhichOneof("pub_sub") == "publishing":
                for resource in settings.publishing.topics:
                    topic = topic_of(namespace_of(resource, namespace_header(call)), resource)
                    self._access.require(call, sends(topic))
                    if is_transactional(topic):
                        topics[topic] = resource
                group, answer = "", producer_settings(settings, self._cluster.max_body_bytes)
            else:
                group, answer = await self._consumer(call, stream.client_id, settings)
            kind = settings.client_type if settings.HasField("client_type") else ClientType.CLIENT_TYPE_UNSPECIFIED
            self._streams.publishes(stream, topics)
            self._clients.active(
                stream.client_id, self._clock(), client_type=kind, group=group, language=settings.user_agent.language
            )
        except RaymqError as error:
            if error.retryable:
                raise
            raise StreamRefusedError(str(error)) from error
        return answer

    async def _consumer(self, call: CallContext, client_id: str, settings: Settings) -> tuple[str, Settings]:
        subscription = settings.subscription
        namespace = namespace_of(subscription.group, namespace_header(call))
        group = group_of(namespace, subscription.group)
        topics: dict[str, tuple[Resource, str]] = {}
        for entry in subscription.subscriptions:
            topic = topic_of(namespace, entry.topic)
            topics[topic] = entry.topic, subscription_of(topic, entry.expression).description
        if len(topics) > TOPICS_MAX:
            raise InvalidArgumentError(f"a client subscribes to {len(topics)} topics; at most {TOPICS_MAX} are allowed")
        self._access.require(call, *consumes(group, *topics))
        config = await self._cluster.group_config(group)
        answer = consumer_settings(settings, config, fifo=await self._any_ordered(config, topics))
        self._members.announce(client_id, group, topics, settings)
        return group, answer

    async def _any_ordered(self, config: GroupConfig, topics: Iterable[str]) -> bool:
        if config.ordered is not None:
            return config.ordered
        for topic in topics:
            try:
                if is_ordered(config, (await self._cluster.route(topic)).attributes.mapping()):
                    return True
            except TopicNotExistError:
                # the topic may be created later; the client asks for its route then
                continue
        return False


async def _first_command(requests: AsyncIterator[bytes]) -> None:
    """Wait until a client has written its first command or has ended its stream, up to FIRST_COMMAND_S."""
    try:
        async with asyncio.timeout(FIRST_COMMAND_S):
            await anext(requests, None)
    except TimeoutError:
        return


def _refusal(error: BaseException) -> bytes:
    """Return the last answer of a stream that ends with `error`.

    Node's clients wait for an answer to their settings, not for the end of the stream: without this answer, their start
    would never end.
    """
    return TelemetryCommand(status=status_of(error)).SerializeToString()


def _end(stream: CommandStream, reader: asyncio.Task[None]) -> None:
    """End a stream whose reader has ended. Also reads the reader's error: if the client has gone, nobody else does, and
    asyncio logs an unread error."""
    stream.end()
    if not reader.cancelled():
        reader.exception()
