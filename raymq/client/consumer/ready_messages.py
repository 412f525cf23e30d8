"""Measures a consumer's ready messages (messages that it could fetch but has not fetched): their number, and the age of
the first message.

The values are used only for metrics. Every 10 s, one call per broker group requests them for all queues that may have
ready messages. If a fetch of a queue is waiting for a message, the queue has no ready messages, so it is left out of
the call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Final, NamedTuple

from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.layout import RecordError, store_timestamp_at
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master
from raymq.telemetry.metrics.client_figures import ConsumerFigures

QUEUES_MAX: Final = 1024
"""Maximum number of queues for which one call to a broker group requests the number and age of ready messages. For
further queues, the metrics keep their last values."""
FIRST_MESSAGES_MAX_BYTES: Final = 1 << 20
"""Maximum number of bytes that one call reads to find the age of ready messages. The call reads the first ready message
of each queue. If a queue's message is not read because of this limit, the age of the queue's messages stays unknown."""
READY_TIMEOUT_S: Final = 2.0

logger = logging.getLogger(__name__)


class QueueState(NamedTuple):
    """State of one queue of a consumer, from which its metrics are computed: the `figures`, the next offset to fetch,
    and the last known end of the visible messages. The fields `ready` and `queueing_ms` of the `figures` are not set
    yet. `ask`: True if the queue may have more messages, so that `with_ready` asks the storage actor."""

    queue: MessageQueue
    figures: ConsumerFigures
    fetch_offset: int
    visible_end: int
    ask: bool


def with_ready(states: Iterable[QueueState], routes: RouteCache, storages: StorageClients) -> list[ConsumerFigures]:
    """Return the metrics of all queues, including their ready messages. Waits up to 2 s for each storage actor."""
    figures: list[ConsumerFigures] = []
    asked: dict[str, list[QueueState]] = {}
    for state in states:
        some = asked.setdefault(state.queue.broker_name, [])
        if state.ask and len(some) < QUEUES_MAX:
            some.append(state)
        else:
            figures.append(_seen(state))
    for some in asked.values():
        if some:
            figures += _ask(some, routes, storages)
    return figures


def _seen(state: QueueState) -> ConsumerFigures:
    return state.figures._replace(ready=max(0, state.visible_end - state.fetch_offset))


def _ask(states: list[QueueState], routes: RouteCache, storages: StorageClients) -> list[ConsumerFigures]:
    """Return the consumer metrics of queues that belong to one broker group. Asks the group's master; without an
    answer, uses the ends that `states` contain."""
    requests = [FetchRequest(state.queue.topic, state.queue.queue_id, state.fetch_offset, 1) for state in states]

    def fetch(storage: StorageClient, left_s: float) -> list[FetchResult]:
        return storage.fetch(requests, FIRST_MESSAGES_MAX_BYTES, 0.0, left_s)

    try:
        results = call_master(routes, storages, states[0].queue, READY_TIMEOUT_S, fetch)
    except RaymqError as error:
        logger.info("cannot count the ready messages of %d queues: %s", len(states), error)
        return [_seen(state) for state in states]
    now_ms = time.time_ns() // 1_000_000
    return [
        state.figures._replace(
            ready=max(0, result.max_offset - state.fetch_offset), queueing_ms=_age_ms(result.records, now_ms)
        )
        for state, result in zip(states, results, strict=True)
    ]


def _age_ms(records: bytes, now_ms: int) -> int:
    try:
        return max(0, now_ms - store_timestamp_at(records, 0)) if records else 0
    except RecordError:  # ignore the damaged record: the consumer that fetches it reports the error
        return 0
