"""Answers SendMessage and RecallMessage.

The messages of all clients go through one AsyncProducer, which gathers them in batches. A request of several messages
is stored in one queue, in order. Each message keeps the id that its client gave it. A send that a client repeats is
stored once: in one process by `raymq.gateway.clients.send_window`, over the death of a process by
`raymq.gateway.service.stored_sends`. A message of a transaction is stored as a half message
(`raymq.gateway.service.transaction_calls`). Official clients do not repeat its send.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from raymq.common.errors import RequestTimeoutError, TopicNotExistError
from raymq.common.message import SendResult
from raymq.common.protocol.attributes import PLAIN_ATTRIBUTES, TopicMessageType
from raymq.gateway.calls import CallContext, Handlers
from raymq.gateway.clients.access import GatewayAccess, sends
from raymq.gateway.clients.send_window import SendWindow
from raymq.gateway.convert.incoming import IncomingMessage, check_kind, incoming
from raymq.gateway.convert.names import namespace_of, topic_of
from raymq.gateway.convert.statuses import CallRefusedError, common_status, ok, sent_status
from raymq.gateway.service.answers import answer_left_s, answered, client_id_of, namespace_header
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.service.stored_sends import StoredSends
from raymq.gateway.service.transaction_calls import TransactionCalls
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.table import SERVICE


class SendCalls:
    """The calls that send messages, and recall delayed messages."""

    def __init__(
        self,
        cluster: GatewayCluster,
        access: GatewayAccess,
        transactions: TransactionCalls,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster, self._access, self._transactions = cluster, access, transactions
        self._window: SendWindow[list[wire.SendResultEntry]] = SendWindow(clock, _are_safe)
        self._stored_sends = StoredSends(cluster, clock)

    def expire(self) -> None:
        """Forget sends that ended so long ago that no client repeats them."""
        self._window.expire()

    def handlers(self) -> Handlers:
        return {
            f"/{SERVICE}/SendMessage": answered(self._access, wire.SendMessageRequest, self._send, _failed),
            f"/{SERVICE}/RecallMessage": answered(
                self._access,
                wire.RecallMessageRequest,
                self._recall,
                lambda status, _: wire.RecallMessageResponse(status=status),
            ),
        }

    async def _send(self, call: CallContext, request: wire.SendMessageRequest) -> wire.SendMessageResponse:
        messages = await self._checked(call, request)
        left_s = self._left_s(call)
        # The messages themselves are in the key: a client that uses an id twice must not lose a message.
        client_id = client_id_of(call)
        key = client_id, *(message.fingerprint() for message in messages)
        repeated = self._window.has_failed(key) or self._stored_sends.may_be_repeated(client_id, call.peer)
        entries = await self._window.send(key, lambda: self._stored(call, request, messages, repeated), left_s)
        return wire.SendMessageResponse(status=common_status([one.status for one in entries]), entries=entries)

    async def _checked(self, call: CallContext, request: wire.SendMessageRequest) -> list[IncomingMessage]:
        """Check all messages of a request, so that either none is refused or none is sent."""
        if not request.messages:
            raise CallRefusedError(Code.MESSAGE_CORRUPTED, "the request has no message")
        resource = request.messages[0].topic
        if any(message.topic != resource for message in request.messages):
            raise CallRefusedError(Code.MESSAGE_CORRUPTED, "the messages of a request must have the same topic")
        topic = topic_of(namespace_of(resource, namespace_header(call)), resource)
        self._access.require(call, sends(topic))
        now_ms, longest = time.time_ns() // 1_000_000, self._cluster.max_body_bytes
        messages = [incoming(message, topic, now_ms, longest) for message in request.messages]
        try:
            attributes = (await self._cluster.route(topic)).attributes
        except TopicNotExistError:
            # the producer creates the topic if the cluster allows it, and raises this error otherwise
            attributes = PLAIN_ATTRIBUTES
        for message in messages:
            if message.kind is TopicMessageType.TRANSACTION and len(messages) > 1:
                raise CallRefusedError(
                    Code.BAD_REQUEST, "a request with a message of a transaction has no other message"
                )
            check_kind(topic, attributes, message.kind)
        return messages

    async def _stored(
        self, call: CallContext, request: wire.SendMessageRequest, messages: list[IncomingMessage], repeated: bool
    ) -> list[wire.SendResultEntry]:
        """Store the messages of a request, within the producer's own timeout. `repeated`: True if the stores may have
        them already."""
        self._access.take_sent(call, request.ByteSize(), len(messages))
        if messages[0].kind is TopicMessageType.TRANSACTION:
            return [_entry(*await self._transactions.begin(request.messages[0], messages[0]))]
        if not repeated:
            return await self._produced(messages)
        asked = [one for one in messages if one.message_id not in call.new_ids]
        if not asked:
            return await self._produced(messages)
        answers = iter(await self._stored_sends.find(asked))
        known = [None if one.message_id in call.new_ids else next(answers) for one in messages]
        rest = [one for one, entry in zip(messages, known, strict=True) if entry is None]
        sent = iter(await self._produced(rest) if rest else ())
        return [next(sent) if entry is None else entry for entry in known]

    async def _produced(self, messages: list[IncomingMessage]) -> list[wire.SendResultEntry]:
        producer, key = self._cluster.producer, messages[0].sharding_key
        if len(messages) > 1:
            batch, ids = [one.message for one in messages], [one.message_id for one in messages]
            return [_entry(one) for one in await producer.send_batch(batch, message_ids=ids, sharding_key=key)]
        [one] = messages
        return [_entry(await producer.send(one.message, message_id=one.message_id, sharding_key=key))]

    def _left_s(self, call: CallContext) -> float:
        """Return the time in seconds in which a call must have an answer. Raises RequestTimeoutError if the caller has
        stopped waiting: nothing was sent."""
        left_s = answer_left_s(call)
        if left_s <= 0:
            raise RequestTimeoutError("a send that reached the gateway late", call.left_s())
        return left_s

    async def _recall(self, call: CallContext, request: wire.RecallMessageRequest) -> wire.RecallMessageResponse:
        topic = topic_of(namespace_of(request.topic, namespace_header(call)), request.topic)
        self._access.require(call, sends(topic))
        found = await self._cluster.producer.recall(
            topic, request.recall_handle, timeout_s=min(self._left_s(call), self._cluster.send_timeout_s)
        )
        return wire.RecallMessageResponse(status=ok(), message_id=found)


def _are_safe(entries: list[wire.SendResultEntry]) -> bool:
    """Return False if a message is stored less durably than was requested. The stores can tell later if it is safe."""
    return all(entry.status.code == Code.OK for entry in entries)


def _entry(result: SendResult, transaction_id: str = "") -> wire.SendResultEntry:
    return wire.SendResultEntry(
        status=sent_status(result.status),
        message_id=result.message_id,
        transaction_id=transaction_id,
        offset=result.queue_offset,
        recall_handle=result.recall_handle,
    )


def _failed(status: wire.Status, request: wire.SendMessageRequest | None) -> wire.SendMessageResponse:
    """Return the answer to a request that failed. It has an entry for each message, which clients require."""
    count = 0 if request is None else len(request.messages)
    return wire.SendMessageResponse(status=status, entries=[wire.SendResultEntry(status=status)] * count)
