"""Answers ReceiveMessage, AckMessage, ChangeInvisibleDuration and ForwardMessageToDeadLetterQueue.

A receipt handle has all that settles a message, so any gateway settles what another gateway received. A message that no
client got, because the client left, is visible to other clients at once. The leases of push consumers are renewed while
the client is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from raymq.client.consumer.simple.received_message import ReceivedMessage
from raymq.client.consumer.simple.renewal import RENEW_TIMEOUT_S, DueLeases, Renewals
from raymq.common.errors import (
    BodyUnreadableError,
    InvalidArgumentError,
    RaymqError,
    ServiceNotAvailableError,
    SystemBusyError,
)
from raymq.common.namespaces import Namespace
from raymq.gateway.calls import AnswerStream, CallContext, Handlers
from raymq.gateway.clients.access import GatewayAccess, consumes
from raymq.gateway.clients.connected_clients import ConnectedClients
from raymq.gateway.convert.leases import invisible_time, lease_terms
from raymq.gateway.convert.names import group_of, handle_of, namespace_of, subscription_of, topic_of
from raymq.gateway.convert.outgoing import LeasedDelivery, outgoing
from raymq.gateway.convert.routes import broker_groups_of
from raymq.gateway.convert.statuses import CallRefusedError, common_status, ok, status_of
from raymq.gateway.convert.times import timestamp
from raymq.gateway.service.answers import answered, client_id_of, in_time, namespace_header
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.service.gathered_acks import GatheredAcks
from raymq.gateway.service.polling_receive import GroupCalls, PollingReceive
from raymq.gateway.service.push_renewals import PushRenewals
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import ClientType, Code
from raymq.gateway.wire.parsing import parse_request
from raymq.gateway.wire.table import SERVICE

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_VERSION: Final = "x-mq-client-version"
UNREADABLE_AGAIN_MS: Final = 5_000
"""Time in ms after which a message with an unreadable body is delivered again. A replica may repair it."""

GONE_AGAIN_MS: Final = 1_000
"""Time in ms after which the messages of a push consumer that has gone are delivered again, as in RocketMQ."""


class ReceiveCalls:
    """The calls of consumers that lease messages and settle them."""

    def __init__(
        self,
        cluster: GatewayCluster,
        access: GatewayAccess,
        clients: ConnectedClients,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._access, self._clients, self._clock = cluster, access, clients, clock
        self.renewals = PushRenewals()
        self._acks = GatheredAcks()
        self._waiting: dict[str, set[asyncio.Future[list[ReceivedMessage]]]] = {}
        """The receives of each client that wait for a message, by client id."""

    def handlers(self) -> Handlers:
        return {
            f"/{SERVICE}/ReceiveMessage": AnswerStream(self._receive),
            f"/{SERVICE}/AckMessage": answered(self._access, wire.AckMessageRequest, self._ack, _ack_failed),
            f"/{SERVICE}/ChangeInvisibleDuration": answered(
                self._access, wire.ChangeInvisibleDurationRequest, self._change, _change_failed
            ),
            f"/{SERVICE}/ForwardMessageToDeadLetterQueue": answered(
                self._access,
                wire.ForwardMessageToDeadLetterQueueRequest,
                self._forward,
                lambda status, _: wire.ForwardMessageToDeadLetterQueueResponse(status=status),
            ),
        }

    # ReceiveMessage

    async def _receive(self, call: CallContext, data: bytes) -> AsyncGenerator[bytes, None]:
        """Answer a receive: the status, the messages, and the time of the delivery, in this order. Clients count an
        answer without a status as a fault."""
        messages: list[ReceivedMessage] = []
        receive: PollingReceive | None = None
        written = 0
        try:
            try:
                client_id_of(call)
                call = self._access.authenticated(call)
                client_id = client_id_of(call)
                request = parse_request(wire.ReceiveMessageRequest, data)
                receive = await self._begun(call, request)
                messages = await self._until_ended(client_id, receive)
                if request.auto_renew and messages:
                    self._hold(client_id, receive, messages)
                status = ok() if messages else wire.Status(code=Code.MESSAGE_NOT_FOUND, message="no new message")
            # every error of a call is answered with a status; the log has the unexpected ones
            except Exception as error:
                status = status_of(error)
            yield wire.ReceiveMessageResponse(status=status).SerializeToString()
            for message in messages:
                answer = self._message(receive, message, request) if receive is not None else None
                if answer is not None:
                    data = wire.ReceiveMessageResponse(message=answer).SerializeToString()
                    self._access.charge_consumed(call, len(data), 1)
                    yield data
                written += 1
            now_ms = time.time_ns() // 1_000_000
            yield wire.ReceiveMessageResponse(delivery_timestamp=timestamp(now_ms)).SerializeToString()
        finally:
            if receive is not None and written < len(messages):
                self._cluster.later(receive.give_back(messages[written:]))

    async def _until_ended(self, client_id: str, receive: PollingReceive) -> list[ReceivedMessage]:
        """Run a receive. Returns no message if the client ends, or if `end_receives` is called."""
        running = asyncio.ensure_future(self._cluster.receive(receive))
        waiting = self._waiting.setdefault(client_id, set())
        waiting.add(running)
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            if not running.done():
                running.cancel()
            elif not running.cancelled() and running.exception() is None:
                self._cluster.later(receive.give_back(running.result()))
            raise
        finally:
            waiting.discard(running)
            if not waiting and self._waiting.get(client_id) is waiting:
                del self._waiting[client_id]
        return [] if running.cancelled() else running.result()

    def end_receives(self, client_id: str | None = None) -> None:
        """Answer at once the receives of a client that wait for a message; None: of all clients. The answers have no
        message."""
        waiting = list(self._waiting.values()) if client_id is None else [self._waiting.get(client_id, set())]
        for running in [one for own in waiting for one in own]:
            running.cancel()

    def client_gone(self, client_id: str) -> None:
        """End the receives of a client that has gone, and return its leases, so that other clients get its messages
        soon. If a broker does not answer, they get the messages after the leases."""
        self.end_receives(client_id)
        for calls, due in self.renewals.release(client_id):
            parts = list(due.leases.values())
            self._cluster.later(calls.return_parts(due.broker_name, parts, GONE_AGAIN_MS))

    async def _begun(self, call: CallContext, request: wire.ReceiveMessageRequest) -> PollingReceive:
        """Check a receive, and return it ready to run."""
        resource = request.message_queue.topic
        namespace, group, topic = self._places(call, request.group, resource)
        subscription = subscription_of(topic, request.filter_expression)
        terms = lease_terms(request, call.left_s(), call.metadata.get(CLIENT_VERSION, ""))
        terms = replace(terms, max_messages=self._access.portion(call, terms.max_messages))
        route = await self._cluster.route(topic)
        wished = request.message_queue.broker.name
        names = {queue.broker_name for queue in route.subscribe_queues}
        brokers = sorted(names, key=lambda name: (name != wished, name))
        if request.auto_renew and wished in names:
            # A push consumer receives from each broker group by a call of its own. If each call waited at all groups,
            # the waits would grow with the square of the number of groups.
            brokers = [wished]
        if not brokers:
            raise ServiceNotAvailableError(f"topic {topic!r} has no queue that can be read now; see `raymq status`")
        calls = self._cluster.group_calls(group, namespace)
        return PollingReceive(calls, subscription, brokers, terms, request.attempt_id)

    def _hold(self, client_id: str, receive: PollingReceive, messages: list[ReceivedMessage]) -> None:
        """Begin to renew the messages of a push consumer. If the gateway has too many clients, they are not renewed."""
        now_s, group = self._clock(), receive.calls.group
        try:
            self._clients.active(client_id, now_s, client_type=ClientType.PUSH_CONSUMER, group=group)
        except SystemBusyError as error:
            logger.info("the messages of client %s are not renewed: %s", client_id, error)
            return
        self.renewals.hold(client_id, receive.calls, messages, receive.terms.invisible_ms, now_s)

    async def renew_due(self) -> int:
        """Renew the leases that are due, with one call for each broker and group. A lease whose renewal failed is
        renewed again in the next call of this method, unless the failure is final. Returns the number of renewed
        leases."""
        return sum(await asyncio.gather(*(self._renew(*one) for one in self.renewals.due(self._clock()))))

    async def _renew(self, calls: GroupCalls, due: DueLeases, table: Renewals) -> int:
        sent_s, parts = self._clock(), list(due.leases.values())
        try:
            results = await calls.extend_once(due.broker_name, parts, due.invisible_ms, RENEW_TIMEOUT_S)
        except RaymqError as error:
            logger.info("leases of group %s at broker %s were not renewed: %s", calls.group, due.broker_name, error)
            table.failed(due.leases, self._clock(), retryable=error.retryable)
            return 0
        table.renewed(due.leases, results, sent_s)
        return sum(results)

    def _message(
        self, receive: PollingReceive, message: ReceivedMessage, request: wire.ReceiveMessageRequest
    ) -> wire.Message | None:
        """Return a message as the client gets it; None for a message whose body cannot be read, which is delivered
        again later."""
        delivery = LeasedDelivery(message.handle, message.attempt, receive.terms.invisible_ms)
        try:
            return outgoing(message, request.message_queue.topic, delivery)
        except BodyUnreadableError:
            self._cluster.later(receive.calls.change_invisible([message], UNREADABLE_AGAIN_MS))
            return None

    # Calls that settle messages

    async def _ack(self, call: CallContext, request: wire.AckMessageRequest) -> wire.AckMessageResponse:
        """Acknowledge messages. An entry with a wrong handle does not stop the others. A message that was acknowledged
        or delivered again is acknowledged again, without an effect."""
        if not request.entries:
            raise CallRefusedError(Code.BAD_REQUEST, "the request has no entry")
        namespace, group, topic = self._places(call, request.group, request.topic)
        statuses: dict[str, wire.Status] = {}
        handles: dict[str, str] = {}
        for text in dict.fromkeys(entry.receipt_handle for entry in request.entries):
            try:
                handles[text] = handle_of(group, topic, text)
            except CallRefusedError as error:
                statuses[text] = status_of(error)
        calls = self._cluster.group_calls(group, namespace)
        by_broker = await self._by_broker(topic, handles)
        acks = [self._acked(call, calls, topic, [handles[text] for text in own]) for own in by_broker]
        for own, status in zip(by_broker, await asyncio.gather(*acks), strict=True):
            statuses |= dict.fromkeys(own, status)
        entries = [
            wire.AckMessageResultEntry(
                message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=statuses[entry.receipt_handle]
            )
            for entry in request.entries
        ]
        return wire.AckMessageResponse(status=common_status([entry.status for entry in entries]), entries=entries)

    async def _by_broker(self, topic: str, handles: dict[str, str]) -> list[list[str]]:
        """Group handles by their broker, so that a broker group that is away fails only its own handles. The handles of
        brokers that do not have the topic are one group: they would fail the handles of any other group."""
        known = broker_groups_of(await self._cluster.route(topic))
        groups: dict[str, list[str]] = {}
        for text, handle in handles.items():
            broker_name = handle.split(" ")[5]
            groups.setdefault(broker_name if broker_name in known else "", []).append(text)
        return list(groups.values())

    async def _acked(self, call: CallContext, calls: GroupCalls, topic: str, handles: Sequence[str]) -> wire.Status:
        """Acknowledge the handles of one broker, and return their status. After the status of a timeout, the broker may
        still acknowledge them."""
        try:
            await in_time(call, "an acknowledgement", self._acks.ack(calls, topic, handles))
            self.renewals.settle(calls.group, topic, handles)
        except InvalidArgumentError as error:
            return wire.Status(code=Code.INVALID_RECEIPT_HANDLE, message=str(error))
        # the entries of other brokers have a status of their own
        except Exception as error:
            return status_of(error)
        return ok()

    async def _change(
        self, call: CallContext, request: wire.ChangeInvisibleDurationRequest
    ) -> wire.ChangeInvisibleDurationResponse:
        """Change the invisible time of a message. Raises CallRefusedError if its lease has ended: clients then stop,
        and repeat the call after any other error."""
        namespace, group, topic = self._places(call, request.group, request.topic)
        invisible_ms = invisible_time(request.invisible_duration)
        handle = handle_of(group, topic, request.receipt_handle)
        calls = self._cluster.group_calls(group, namespace)
        change = calls.change_invisible_handles(topic, [handle], invisible_ms)
        [renewed] = await self._settled(in_time(call, "a change of the invisible time", change))
        self.renewals.settle(group, topic, [handle])
        if renewed is None:
            raise CallRefusedError(
                Code.INVALID_RECEIPT_HANDLE, "the message was acknowledged, forwarded or delivered again"
            )
        return wire.ChangeInvisibleDurationResponse(status=ok(), receipt_handle=renewed)

    async def _forward(
        self, call: CallContext, request: wire.ForwardMessageToDeadLetterQueueRequest
    ) -> wire.ForwardMessageToDeadLetterQueueResponse:
        """Forward a message to the dead letters of its group. A repeated call stores no second letter."""
        namespace, group, topic = self._places(call, request.group, request.topic)
        handle = handle_of(group, topic, request.receipt_handle)
        calls = self._cluster.group_calls(group, namespace)
        letter = calls.dead_letter(topic, handle, max(request.delivery_attempt, 0))
        await self._settled(in_time(call, "a forward to the dead letters", letter))
        self.renewals.settle(group, topic, [handle])
        return wire.ForwardMessageToDeadLetterQueueResponse(status=ok())

    @staticmethod
    async def _settled(call: Awaitable[T]) -> T:
        """Await a call that settles one message. A handle of a broker without the topic is an illegal handle."""
        try:
            return await call
        except InvalidArgumentError as error:
            raise CallRefusedError(Code.INVALID_RECEIPT_HANDLE, str(error)) from None

    def _places(self, call: CallContext, group: wire.Resource, topic: wire.Resource) -> tuple[Namespace, str, str]:
        """Return the namespace of a request, and the stored names of its group and topic. Raises AccessDeniedError if
        the call's user may not consume them."""
        namespace = namespace_of(group, topic.resource_namespace or namespace_header(call))
        names = group_of(namespace, group), topic_of(namespace, topic)
        self._access.require(call, *consumes(*names))
        return namespace, *names


def _ack_failed(status: wire.Status, request: wire.AckMessageRequest | None) -> wire.AckMessageResponse:
    entries = [] if request is None else request.entries
    return wire.AckMessageResponse(
        status=status,
        entries=[
            wire.AckMessageResultEntry(message_id=one.message_id, receipt_handle=one.receipt_handle, status=status)
            for one in entries
        ],
    )


def _change_failed(
    status: wire.Status, request: wire.ChangeInvisibleDurationRequest | None
) -> wire.ChangeInvisibleDurationResponse:
    """Return the answer to a failed change, with the old handle: a client takes the handle before it reads the
    status."""
    handle = "" if request is None else request.receipt_handle
    return wire.ChangeInvisibleDurationResponse(status=status, receipt_handle=handle)
