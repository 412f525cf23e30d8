"""Answers PullMessage, UpdateOffset, GetOffset, QueryOffset and SyncLiteSubscription.

A pull consumer chooses queues and offsets itself. No published client of RocketMQ 5 makes these calls yet. A pull that
waits for a message holds no thread: the gateway asks the store again after a short pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Final

from raymq.client.consumer.pull_once import PULL_MAX_MESSAGES
from raymq.common.errors import BodyUnreadableError, OffsetOutOfRangeError
from raymq.common.message import MessageExt, MessageQueue
from raymq.gateway.calls import AnswerStream, CallContext, Handlers
from raymq.gateway.clients.access import GatewayAccess, consumes, sees
from raymq.gateway.convert.client_settings import LONG_POLLING_MS
from raymq.gateway.convert.leases import POLLING_MARGIN_S
from raymq.gateway.convert.names import group_of, namespace_of, subscription_of, topic_of
from raymq.gateway.convert.outgoing import outgoing
from raymq.gateway.convert.statuses import CallRefusedError, ok, status_of
from raymq.gateway.convert.times import millis
from raymq.gateway.service.answers import answered, client_id_of, namespace_header
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code, QueryOffsetPolicy
from raymq.gateway.wire.parsing import parse_request
from raymq.gateway.wire.table import SERVICE

PULL_PAUSE_S: Final = 0.05
PULL_PAUSE_MAX_S: Final = 0.5
"""Longest pause in seconds between two looks of a pull that waits."""


class PullCalls:
    """The calls of pull consumers."""

    def __init__(self, cluster: GatewayCluster, access: GatewayAccess) -> None:
        self._cluster, self._access = cluster, access

    def handlers(self) -> Handlers:
        return {
            f"/{SERVICE}/PullMessage": AnswerStream(self._pull),
            f"/{SERVICE}/UpdateOffset": answered(
                self._access,
                wire.UpdateOffsetRequest,
                self._update,
                lambda status, _: wire.UpdateOffsetResponse(status=status),
            ),
            f"/{SERVICE}/GetOffset": answered(
                self._access, wire.GetOffsetRequest, self._get, lambda status, _: wire.GetOffsetResponse(status=status)
            ),
            f"/{SERVICE}/QueryOffset": answered(
                self._access,
                wire.QueryOffsetRequest,
                self._query,
                lambda status, _: wire.QueryOffsetResponse(status=status),
            ),
            f"/{SERVICE}/SyncLiteSubscription": answered(
                self._access,
                wire.SyncLiteSubscriptionRequest,
                self._sync,
                lambda status, _: wire.SyncLiteSubscriptionResponse(status=status),
            ),
        }

    async def _pull(self, call: CallContext, data: bytes) -> AsyncGenerator[bytes, None]:
        """Answer a pull: the status, the messages, and the offset of the next pull, in this order."""
        messages: list[wire.Message] = []
        next_offset: int | None = None
        try:
            client_id_of(call)
            call = self._access.authenticated(call)
            request = parse_request(wire.PullMessageRequest, data)
            found, end = await self._pulled(call, request)
            messages = _readable(found, request.message_queue.topic)
            next_offset = end if len(messages) == len(found) else found[len(messages)].queue_offset
            status = ok() if messages else wire.Status(code=Code.MESSAGE_NOT_FOUND, message="no new message")
        except OffsetOutOfRangeError as error:
            status = wire.Status(code=Code.ILLEGAL_OFFSET, message=str(error))
            next_offset = max(error.min_offset, min(error.queue_offset, error.max_offset))
        # every error of a call is answered with a status; the log has the unexpected ones
        except Exception as error:
            status = status_of(error)
        yield wire.PullMessageResponse(status=status).SerializeToString()
        for message in messages:
            answer = wire.PullMessageResponse(message=message).SerializeToString()
            self._access.charge_consumed(call, len(answer), 1)
            yield answer
        if next_offset is not None:
            yield wire.PullMessageResponse(next_offset=next_offset).SerializeToString()

    async def _pulled(self, call: CallContext, request: wire.PullMessageRequest) -> tuple[list[MessageExt], int]:
        """Return the next messages of a queue, and the offset after them. Waits for the first message as long as the
        client asks; excluded messages do not end the wait."""
        queue, _ = self._queue(call, request.message_queue, request.group)
        subscription = subscription_of(queue.topic, request.filter_expression)
        if request.batch_size < 1:
            raise CallRefusedError(Code.BAD_REQUEST, f"batch_size is {request.batch_size}; it must be at least 1")
        count = self._access.portion(call, min(request.batch_size, PULL_MAX_MESSAGES))
        if request.offset < 0:
            raise _illegal_offset(request.offset)
        wait_ms = min(max(millis(request.long_polling_timeout), 0), LONG_POLLING_MS)
        loop, offset, pause_s = asyncio.get_running_loop(), request.offset, PULL_PAUSE_S
        end_s = loop.time() + min(wait_ms / 1000, call.left_s() - POLLING_MARGIN_S)
        while True:
            result = await self._cluster.call(self._cluster.queues.pull, queue, subscription, offset, count)
            if result.messages or loop.time() >= end_s:
                return list(result.messages), result.next_offset
            if result.next_offset == offset:
                await asyncio.sleep(min(pause_s, max(end_s - loop.time(), 0.0)))
                pause_s = min(2 * pause_s, PULL_PAUSE_MAX_S)
            offset = result.next_offset

    async def _update(self, call: CallContext, request: wire.UpdateOffsetRequest) -> wire.UpdateOffsetResponse:
        queue, group = self._queue(call, request.message_queue, request.group)
        if request.offset < 0:
            raise _illegal_offset(request.offset)
        await self._cluster.call(self._cluster.queues.commit, group, queue, request.offset)
        return wire.UpdateOffsetResponse(status=ok())

    async def _get(self, call: CallContext, request: wire.GetOffsetRequest) -> wire.GetOffsetResponse:
        queue, group = self._queue(call, request.message_queue, request.group)
        offset = await self._cluster.call(self._cluster.queues.committed, group, queue)
        if offset is None:
            raise CallRefusedError(
                Code.OFFSET_NOT_FOUND, f"group {group!r} has committed no offset of queue {queue.queue_id}"
            )
        return wire.GetOffsetResponse(status=ok(), offset=offset)

    async def _query(self, call: CallContext, request: wire.QueryOffsetRequest) -> wire.QueryOffsetResponse:
        resource = request.message_queue.topic
        topic = topic_of(namespace_of(resource, namespace_header(call)), resource)
        self._access.require(call, sees(topic))
        queue = MessageQueue(topic, request.message_queue.broker.name, request.message_queue.id)
        queues, policy = self._cluster.queues, request.query_offset_policy
        if policy == QueryOffsetPolicy.TIMESTAMP:
            if not request.HasField("timestamp"):
                raise CallRefusedError(Code.BAD_REQUEST, "a query by time needs a timestamp")
            offset = await self._cluster.call(queues.offset_at, queue, max(millis(request.timestamp), 0))
        elif policy in (QueryOffsetPolicy.BEGINNING, QueryOffsetPolicy.END):
            bounds = await self._cluster.call(queues.bounds, queue)
            offset = bounds.min_offset if policy == QueryOffsetPolicy.BEGINNING else bounds.max_offset
        else:
            raise CallRefusedError(Code.BAD_REQUEST, f"policy {policy} is unknown: use BEGINNING, END or TIMESTAMP")
        return wire.QueryOffsetResponse(status=ok(), offset=offset)

    async def _sync(
        self, call: CallContext, request: wire.SyncLiteSubscriptionRequest
    ) -> wire.SyncLiteSubscriptionResponse:
        raise CallRefusedError(Code.UNSUPPORTED, "lite topics are not supported: subscribe to a topic by tags")

    def _queue(self, call: CallContext, queue: wire.MessageQueue, group: wire.Resource) -> tuple[MessageQueue, str]:
        """Return the queue and the group of a request, by their stored names. Raises AccessDeniedError if the call's
        user may not consume them."""
        namespace = namespace_of(group, queue.topic.resource_namespace or namespace_header(call))
        stored, topic = group_of(namespace, group), topic_of(namespace, queue.topic)
        self._access.require(call, *consumes(stored, topic))
        return MessageQueue(topic, queue.broker.name, queue.id), stored


def _readable(found: Sequence[MessageExt], topic: wire.Resource) -> list[wire.Message]:
    """Return the messages before the first one that cannot be read. Raises BodyUnreadableError if this is the first
    message: a client must not pass over it unknowingly. The store repairs it if a replica has it intact."""
    messages: list[wire.Message] = []
    for message in found:
        try:
            messages.append(outgoing(message, topic))
        except BodyUnreadableError:
            if not messages:
                raise
            break
    return messages


def _illegal_offset(offset: int) -> CallRefusedError:
    return CallRefusedError(Code.ILLEGAL_OFFSET, f"offset {offset} is negative")
