"""Begins and ends the transactions of clients, and asks connected producers about transactions without an outcome.

Nothing of a transaction is kept here. The transaction id has all that ends the transaction, so any gateway ends the
transactions of any other. Each gateway polls the brokers for checks of the topics to which its own clients publish, so
a producer of any gateway can answer a check. The broker repeats each check until it has an outcome.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Final

from raymq.common.errors import RaymqError
from raymq.common.message import SendResult, SendStatus
from raymq.common.names import GROUP_NAME_MAX
from raymq.common.protocol.transactions import LocalTransactionState, TransactionCheck
from raymq.gateway.calls import CallContext, Handlers
from raymq.gateway.clients.access import GatewayAccess, sends
from raymq.gateway.clients.command_streams import CommandStreams
from raymq.gateway.convert.incoming import IncomingMessage
from raymq.gateway.convert.names import namespace_of, topic_of
from raymq.gateway.convert.routes import broker_groups_of
from raymq.gateway.convert.statuses import CallRefusedError, ok
from raymq.gateway.convert.transactions import (
    end_order,
    half_of,
    is_transactional,
    place_of,
    recovery_command,
    requested_end,
)
from raymq.gateway.service.answers import answer_left_s, answered, namespace_header
from raymq.gateway.service.cluster import GatewayCluster
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.table import SERVICE

CHECKS_POLL_S: Final = 1.0
"""Time in seconds between two polls of the brokers for checks."""
POLLED_TOPICS_MAX: Final = 1000
"""Maximum number of topics in one poll. If there are more topics, the polls take turns."""

logger = logging.getLogger(__name__)


class TransactionCalls:
    """The call that ends transactions, and the checks of transactions. `streams`: the streams of this process's
    clients."""

    def __init__(self, cluster: GatewayCluster, access: GatewayAccess, streams: CommandStreams) -> None:
        self._cluster, self._access, self._streams = cluster, access, streams
        self._client_id = f"gateway-{secrets.token_hex(8)}"
        self._polled: list[str] = []
        """The topics whose checks this gateway takes. The topics of the next poll are first."""

    def handlers(self) -> Handlers:
        return {
            f"/{SERVICE}/EndTransaction": answered(
                self._access,
                wire.EndTransactionRequest,
                self._end,
                lambda status, _: wire.EndTransactionResponse(status=status),
            )
        }

    async def begin(self, sent: wire.Message, converted: IncomingMessage) -> tuple[SendResult, str]:
        """Store the half message of a client's message. Returns the result, and the transaction id.

        A client takes a half message that is less durable than its topic promises for not sent, and begins another
        transaction. So such a half message is rolled back. Raises the errors of `AsyncProducer.send`.
        """
        topic = converted.message.topic
        if not is_transactional(topic):
            raise CallRefusedError(
                Code.ILLEGAL_TOPIC, f"the name of a topic with transactions has at most {GROUP_NAME_MAX} characters"
            )
        producer, key = self._cluster.producer, converted.sharding_key
        half = await producer.send(half_of(sent, converted), message_id=converted.message_id, sharding_key=key)
        place = place_of(half)
        if half.status is not SendStatus.SEND_OK:
            order = end_order(topic, place, LocalTransactionState.ROLLBACK_MESSAGE)
            cluster, end = self._cluster, self._cluster.transactions.end
            cluster.later(cluster.call(end, place.broker_name, topic, order, cluster.send_timeout_s))
        return half, str(place)

    async def _end(self, call: CallContext, request: wire.EndTransactionRequest) -> wire.EndTransactionResponse:
        """End a transaction. A repeated call changes nothing. Raises TransactionError if the transaction ended with the
        other outcome: the client must not believe that its outcome counts."""
        topic = topic_of(namespace_of(request.topic, namespace_header(call)), request.topic)
        self._access.require(call, sends(topic))
        wanted = requested_end(topic, request)
        if wanted is not None:
            broker_name, order = wanted
            route = await self._cluster.route(topic)
            if broker_name not in broker_groups_of(route):
                raise CallRefusedError(
                    Code.INVALID_TRANSACTION_ID, f"topic {topic!r} has no broker group of this transaction"
                )
            timeout_s = min(answer_left_s(call), self._cluster.send_timeout_s)
            await self._cluster.call(self._cluster.transactions.end, broker_name, topic, order, timeout_s)
        return wire.EndTransactionResponse(status=ok())

    # Checks

    async def run(self) -> None:
        """Poll for checks every CHECKS_POLL_S, until the task is cancelled."""
        while True:
            await asyncio.sleep(CHECKS_POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Take the checks of connected producers' topics from all brokers, and pass the checks to the producers."""
        topics = dict.fromkeys(self._streams.published_topics())
        left = [topic for topic in self._polled if topic not in topics]
        # topics that were polled last come after the others
        self._polled = [*(one for one in self._polled if one in topics), *(topics.keys() - set(self._polled))]
        if not topics and not left:
            return
        try:
            brokers = await self._cluster.call(self._cluster.transactions.brokers)
        except RaymqError as error:
            logger.info("cannot find the brokers to poll for transaction checks: %s", error)
            return
        part, rest = self._polled[:POLLED_TOPICS_MAX], self._polled[POLLED_TOPICS_MAX:]
        # the first topic becomes the last, because one poll has room for few checks
        self._polled = [*rest, *part[1:], *part[:1]]
        leave = self._cluster.transactions.leave_checks
        for broker in brokers:
            for topic in left:
                self._cluster.later(self._cluster.call(leave, broker, topic, self._client_id))
        if part:
            await asyncio.gather(*(self._ask(broker, part) for broker in brokers))

    async def _ask(self, broker_name: str, topics: Sequence[str]) -> None:
        take = self._cluster.transactions.take_checks
        try:
            checks = await self._cluster.call(take, broker_name, topics, self._client_id)
        except RaymqError as error:
            logger.info("cannot poll broker %s for transaction checks: %s", broker_name, error)
            return
        for check in checks:
            self._pass_on(broker_name, check)

    def _pass_on(self, broker_name: str, check: TransactionCheck) -> None:
        """Send a check to a producer of its topic. A check that reaches no producer is repeated by the broker."""
        topic = check.producer_group
        # rights may have changed since the stream was opened
        stream = self._streams.turn(topic, lambda one: self._access.may(one.call, sends(topic)))
        if stream is None:
            return
        try:
            command = recovery_command(check, broker_name, stream.topics[topic])
        # protobuf raises ValueError for a text that is not UTF-8, which a native client may have written
        except (RaymqError, ValueError) as error:
            logger.warning("transaction %s cannot be checked: %s", check.transaction_id, error)
            return
        if not stream.offer(command):
            logger.info("client %s does not read its commands; a check is dropped", stream.client_id)
