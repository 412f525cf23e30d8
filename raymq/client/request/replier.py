"""ListenerReplier: sends the replies that a listener returns, from the listener's process.

A request message counts as consumed if its reply was sent, or can never be sent. If the store refuses a reply, the send
is retried for as long as the requester waits. After that time the reply is dropped and counted.

This module also makes the producers of a listener's process, for replies and for the process's message trace. The
process has joined Ray and has no raymq Client; these producers stop with the process.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import ray

from raymq.client.producer.producer import Producer
from raymq.client.producer.settings import SEND_TIMEOUT_S, ProducerSettings
from raymq.client.request.requests import RequesterLiveness
from raymq.common.errors import CreateReplyMessageError, MessageIllegalError, RaymqError
from raymq.common.message import MessageExt, MessageQueue, SendResult, SystemMessage
from raymq.common.protocol.request_reply import Reply, ReplyStatistics, reply_message, ttl_s
from raymq.remoting.actor_ref import running_nameservers
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients
from raymq.telemetry.trace.deliveries import DeliveryTrace
from raymq.telemetry.trace.dispatcher import TRACE_PRODUCER_GROUP, TRACE_SEND_TIMEOUT_S, TraceDispatcher

logger = logging.getLogger(__name__)

Send = Callable[[SystemMessage, MessageQueue, float], SendResult]
"""Function that sends a message to a queue. The last argument is the timeout in seconds."""

MIN_SEND_S: Final = 1.0
"""Minimum send timeout of a reply in seconds. The remaining time cannot be computed exactly, because the request's
deadline is a time of another machine's clock."""


def replies_of(messages: Sequence[MessageExt], answer: Reply | Sequence[object]) -> tuple[Sequence[Reply | None], str]:
    """Return the replies that a listener returned for these messages, one or None for each message, and an empty
    string. If `answer` is not a valid reply, returns no replies, and the reason."""
    answers: Sequence[object] = [answer] if isinstance(answer, Reply) else answer
    if len(answers) != len(messages):
        return (), (
            f"the listener returned {len(answers)} answer(s) for {len(messages)} messages: return a list that "
            "has a raymq.reply(...) or None for each message"
        )
    replies = [one for one in answers if isinstance(one, Reply | None)]
    if len(replies) != len(answers):
        wrong = sorted({type(one).__name__ for one in answers if not isinstance(one, Reply | None)})
        return (), (
            f"the listener returned a list with {', '.join(wrong)}: each element must be a raymq.reply(...) or None"
        )
    return replies, ""


class ListenerReplier:
    """Sends the replies of one listener's process. Thread-safe. Connects when it sends the first reply.

    `send`: the function that sends a reply; by default, the send function of a producer in this process. `is_gone`:
    function that returns True if a requester has disconnected; by default, it queries the brokers (RequesterLiveness).
    """

    def __init__(self, send: Send | None = None, is_gone: Callable[[MessageExt], bool] | None = None) -> None:
        self._lock = threading.Lock()
        """Lock that guards two attributes: the send function, which is created at the first reply, and the counts of
        replies."""
        self._send = send
        self._is_gone = RequesterLiveness().is_gone if is_gone is None else is_gone
        self._counts = ReplyStatistics()

    def answer(self, messages: Sequence[MessageExt], answer: Reply | Sequence[object]) -> str:
        """Send the replies that a listener returned for these messages. Returns the reason why `answer` is not a valid
        reply; empty if it is valid. Never raises."""
        replies, wrong = replies_of(messages, answer)
        for message, one in zip(messages, replies, strict=not wrong):
            if one is not None:
                self._reply(message, one)
        return wrong

    def statistics(self) -> ReplyStatistics:
        """Return the number of replies so far, by their outcome."""
        with self._lock:
            return self._counts

    def _reply(self, message: MessageExt, one: Reply) -> None:
        try:
            made, queue = reply_message(message, one)
            self._sender()(made, queue, max(ttl_s(message), MIN_SEND_S))
        except CreateReplyMessageError as error:
            logger.info("%s", error)
            self._count("no_request")
        except MessageIllegalError as error:
            logger.error("the reply to message %s is not a legal message: %s", message.message_id, error)
            self._count("unsent")
        except RaymqError as error:
            logger.warning("the reply to message %s was not sent: %s", message.message_id, error)
            self._count("unsent")
        else:
            self._count("sent")
            if self._is_gone(message):
                self._count("gone")

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts = replace(self._counts, **{what: getattr(self._counts, what) + 1})

    def _sender(self) -> Send:
        with self._lock:
            if self._send is None:
                self._send = _connect()
            return self._send


def _connect() -> Send:
    """Make a producer in this process, and return its send function."""
    producer = listener_producer("listener-replies")
    return lambda message, queue, timeout_s: producer.send(message, timeout_s=timeout_s, queue=queue)


def listener_producer(group: str, send_timeout_s: float = SEND_TIMEOUT_S) -> Producer:
    """Make a producer in a listener's process, which has joined Ray but has no Client."""
    storages = StorageClients(ray.get_runtime_context().get_node_id())
    return Producer(
        group,
        routes=RouteCache(running_nameservers()),
        storage=storages.get,
        born_host=(ray.util.get_node_ip_address(), 0),
        settings=ProducerSettings(send_timeout_s=send_timeout_s),
    )


def listener_trace(group: str, topic: str) -> DeliveryTrace:
    """Create the message trace of a listener's process. `group`: the listener's consumer group. The trace connects to
    the cluster before it sends its first trace record."""
    return DeliveryTrace(
        group, TraceDispatcher(lambda: listener_producer(TRACE_PRODUCER_GROUP, TRACE_SEND_TIMEOUT_S), topic)
    )
