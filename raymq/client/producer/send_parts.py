"""Divide the messages of one send call into parts that fit in one request, and record the batch of each
message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from raymq.client.producer.completion import SendFuture
from raymq.client.producer.senders import send_batch as limits
from raymq.client.producer.senders.message_facts import by_stored_queue, cost_bytes
from raymq.client.producer.senders.send_batch import SendBatch, SendRequest
from raymq.client.producer.senders.sender import Sender
from raymq.client.producer.senders.sender_context import Target
from raymq.common.message import Message, MessageQueue
from raymq.records.kernels.message_columns import MessageColumns

BatchPart = tuple[MessageQueue, Sequence[int], list[Message] | MessageColumns, int]
"""The messages of a send call that fit in one request: the queue that stores them, their indices in the call, the
messages, and their cost in bytes."""


class PlacedSend(Struct, eq=False):
    """The batches that contain the messages of one send call.

    `batches`: one entry for each batch. An entry has the batch, the indices (in the call) of the messages in the batch,
    and the index (in the batch) of the first of these messages. `at_once`: usually None. If it is a sender and a
    target, the call has only one batch, and the caller must send this batch itself, through the sender to the target.
    """

    batches: list[tuple[SendBatch, Sequence[int], int]]
    at_once: tuple[Sender, Target] | None = None

    def is_done(self) -> bool:
        """Return True if the first message of each batch has an outcome."""
        return all(batch.completion.done(first) for batch, _, first in self.batches)

    def futures(self, count: int) -> list[SendFuture]:
        """Return one future for each of the `count` messages of the send call, in the order of the call's
        messages."""
        if len(self.batches) == 1:
            [(batch, _, first)] = self.batches
            return [SendFuture(batch.completion, index) for index in range(first, first + count)]
        places = [
            (index, SendFuture(batch.completion, first + at))
            for batch, indices, first in self.batches
            for at, index in enumerate(indices)
        ]
        return [future for _, future in sorted(places, key=lambda place: place[0])]


def cut(request: SendRequest, queue: MessageQueue) -> list[BatchPart]:
    """Cut the messages of a request into parts that fit in one request to a store."""
    # Messages in columns are not cut into parts: they already fit in one request, and they all go to the same queue.
    if isinstance(request.messages, MessageColumns):
        return [(request.stored or queue, range(len(request.messages)), request.messages, request.cost_bytes)]
    messages = list(request.messages)
    if (
        request.plain
        and len(messages) <= limits.BATCH_MAX_MESSAGES
        and (request.cost_bytes <= limits.REQUEST_MAX_BYTES or len(messages) == 1)
    ):
        return [(queue, range(len(messages)), messages, request.cost_bytes)]
    by_queue = {queue: range(len(messages))} if request.plain else by_stored_queue(messages, queue)
    parts: list[BatchPart] = []
    for stored, indices in by_queue.items():
        for part in _cut_indices(messages, indices):
            members = [messages[index] for index in part]
            parts.append((stored, part, members, sum(map(cost_bytes, members))))
    return parts


def _cut_indices(messages: Sequence[Message], indices: Sequence[int]) -> Iterator[Sequence[int]]:
    """Divide the indices of messages into parts. The messages of each part fit in one request to a store."""
    first = count = cost = 0
    for at, index in enumerate(indices):
        more = cost_bytes(messages[index])
        if count and (cost + more > limits.REQUEST_MAX_BYTES or count == limits.BATCH_MAX_MESSAGES):
            yield indices[first:at]
            first, count, cost = at, 0, 0
        count += 1
        cost += more
    yield indices[first:]


def wait_store_msg_ok(messages: list[Message] | MessageColumns) -> bool:
    """Return the value of `wait_store_msg_ok`, which is the same for all given messages."""
    return isinstance(messages, MessageColumns) or messages[0].wait_store_msg_ok
