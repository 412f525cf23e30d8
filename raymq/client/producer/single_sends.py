"""SingleSends: the shortcut for a message that `send` sends alone, in its caller's thread, to an idle broker.

A turn is a period in which the producer sends all such messages of a topic to the same queue. It lasts a few
milliseconds and at most a few hundred messages. The first message of a turn passes through the producer's whole
pipeline. Later messages of the turn go directly to the turn's queue, without a route lookup, a SendRequest or a batch.
A message that cannot take this shortcut passes through the whole pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from msgspec import Struct

from raymq.client.producer.completion import Completion
from raymq.client.producer.queue_selector import (
    KEY_QUEUES_VALID_S,
    TURN_MAX_MESSAGES,
    TURN_MAX_S,
    DestinationOptions,
    QueueTurns,
    own_queue,
)
from raymq.client.producer.senders.message_facts import OVERHEAD_BYTES, cost_bytes
from raymq.client.producer.senders.send_batch import QueueSends, SendBatch, SingleSend
from raymq.client.producer.senders.sender import Sender
from raymq.client.producer.senders.sender_context import SenderContext
from raymq.common.errors import RaymqError
from raymq.common.message import PROPERTY_TRANSACTION_PREPARED, Message, MessageQueue, SendResult, SystemMessage
from raymq.common.parallel import aside
from raymq.common.protocol.route import TopicRoute

logger = logging.getLogger(__name__)


class SendTurn(Struct, eq=False):
    """The queue that receives single messages until the time `until_s`, or until `left` more messages were sent to it.

    `checked`: True if a check has shown that users may send messages to the topic.
    """

    sender: Sender
    sends: QueueSends
    until_s: float
    left: int
    checked: bool


class SingleSends:
    """Sends single messages of one producer in the caller's thread, without the batches and threads of the send
    pipeline. Thread-safe.

    `senders`: the producer's senders by broker name. `route` returns a topic's route or raises an error; it does not
    wait.
    """

    def __init__(
        self,
        context: SenderContext,
        turns: QueueTurns,
        senders: Mapping[str, Sender],
        route: Callable[[str], TopicRoute],
    ) -> None:
        self._context, self._clock = context, context.clock
        self._queue_turns, self._senders, self._route = turns, senders, route
        self._turns: dict[str | MessageQueue, SendTurn] = {}
        """The turns in progress. A turn sends consecutive single messages to one queue. The key is the topic for
        messages without a destination, and the queue for messages that name a queue."""
        self._closed = False

    def send(self, message: Message, where: DestinationOptions, timeout_s: float) -> SendResult | Completion | None:
        """Send a message in this thread, if nothing is in flight to the broker. The message's topic or queue must have
        a turn: a queue that receives the next single messages.

        Returns the message's result, or a Completion if the sender's thread continues the send. Returns None, and
        changes nothing, if the message must pass through the whole pipeline.
        """
        kind = message.__class__
        if (
            (kind is not Message and (kind is not SystemMessage or PROPERTY_TRANSACTION_PREPARED in message.properties))
            or message.delay_level
            or message.deliver_at_ms is not None
        ):
            return None
        size = len(message.body)
        context = self._context
        if size > context.max_message_size_bytes:
            return None
        now_s = self._clock()
        place = (own_queue(message, where) or "") if where else message.topic
        turn = self._turns.get(place)
        if turn is None or (now_s > turn.until_s and (turn := self._next(turn, now_s)) is None):
            return None
        if kind is Message and not turn.checked:
            return None
        sender, buffer = turn.sender, context.buffer
        cost = cost_bytes(message) if message.properties or message.light_queues else size + OVERHEAD_BYTES
        single = SingleSend(message, turn.sends, now_s, timeout_s, cost, buffer.generation, movable=not where)
        try:
            with context.lock:
                if not turn.left or self._closed or (target := sender.begin_single_locked(single)) is None:
                    return None
                single.generation = buffer.generation
                single.allocated = buffer.allocate_locked(cost)
                if not single.allocated:
                    sender.state.release_single(single)
                    return None
                turn.left -= 1
            return sender.send_single(single, target)
        except BaseException as error:
            completion = aside(sender.interrupted, single, error)
            if completion is None or not isinstance(error, Exception):
                raise
            # After this bug the message may be stored. The sender's thread sends it again and finds its true outcome.
            logger.exception("sending to broker group %s failed", sender.broker_name)
            return completion

    def begin_locked(self, batch: SendBatch, sender: Sender) -> None:
        """Begin a turn of a queue: until the turn expires, messages that are sent singly go to the queue of `batch`.
        `batch` has one message. The caller holds the producer's lock."""
        # a delayed message is stored in a system queue, so its queue is not the queue for the next single messages
        if batch.sends.queue != batch.queue:
            return
        # A topic that does not accept messages of users takes only SystemMessages. A plain Message has passed the check
        # of its topic, so the turn need not check the topic again.
        checked = batch.messages[0].__class__ is Message
        valid_s = TURN_MAX_S if batch.movable else KEY_QUEUES_VALID_S
        turn = SendTurn(sender, batch.sends, self._clock() + valid_s, TURN_MAX_MESSAGES - 1, checked)
        self._turns[batch.topic if batch.movable else batch.queue] = turn

    def close_locked(self) -> None:
        """Refuse further messages. The caller holds the producer's lock."""
        self._closed = True
        self._turns.clear()

    def _next(self, before: SendTurn, now_s: float) -> SendTurn | None:
        """Replace a topic's expired turn, `before`, by a turn for the topic's next queue, and return the new turn. The
        new turn's queue receives the next single messages of the topic. Returns None if the pipeline must select the
        queue. This is always so if the messages of `before` name their queue."""
        topic = before.sends.queue.topic
        if self._turns.get(topic) is not before:
            return None
        try:
            route = self._route(topic)
            queue = self._queue_turns.next(route, 1, now_s)
        except RaymqError:
            # No route of the topic is known. Return None, so that the pipeline sends the message: it waits for a route
            # or raises the error.
            return None
        if not route.attributes.takes_normal:
            # the topic has special rules (message type, compaction, inner batches), so the pipeline must send the
            # message
            return None
        sender = self._senders.get(queue.broker_name)
        with self._context.lock:
            if sender is None or self._closed:
                return None
            sends = sender.state.sends(queue)
            turn = SendTurn(sender, sends, now_s + TURN_MAX_S, TURN_MAX_MESSAGES, before.checked)
            self._turns[topic] = turn
        return turn
