"""The metrics of a broker: topics, groups, clients, consumed messages, and the lag of groups.

Each report makes two calls to the store. One call is for the end offsets of all queues. The other call is for the store
times of the oldest messages that groups have not committed. A message's store time never changes, so a report does not
request again the store times that the last report already had.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from actors.broker.monitor import BacklogWatch, BrokerMonitor
from actors.broker.state_log import StateLog
from actors.broker.stored_state import LEASE_CLOCK
from actors.core.broker.progress import Unread, unread_in
from actors.core.broker.state import BrokerState
from actors.request_pool import report_requests
from raymq.common.names import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    dlq_topic,
    is_internal_topic,
    is_light_queue,
    is_system_group,
    is_system_topic,
)
from raymq.common.protocol.clients import ConsumerConnection, ProducerConnection
from raymq.common.protocol.route import PERM_READ, PERM_WRITE
from raymq.common.protocol.stats import RequestFigures
from raymq.common.protocol.store import QueuePosition
from raymq.remoting.storage_client import StorageClient
from raymq.telemetry.metrics.reporter import Reporter

STORE_READ_TIMEOUT_S: Final = 5.0
TIMES_MAX: Final = 2000
"""Maximum number of messages for which one metrics report requests the store times, to compute the age of unread
messages. If some groups remain, the next reports request the store times for these groups."""
KEPT_UP_MAX: Final = 200
"""Maximum number of (group, topic) pairs without unread messages that one report includes.

Every 10 s, each number that is reported to Ray costs 70 µs in this process and 70 µs in Ray's agent. In an idle cluster
of 500 topics and 20 groups all 10,000 numbers are 0.
"""
LANGUAGE: Final = "PYTHON"
OTHER_VERSION: Final = "other"
"""The label for the versions of other libraries than raymq's."""

_Pair = tuple[str, str]
_Bounds = Mapping[str, Sequence[tuple[int, int]]]
"""The first and the end offset of each queue, by topic."""
_UnreadByPair = Mapping[_Pair, Unread]


class Clients(NamedTuple):
    """The clients of a broker, according to the heartbeats that the broker received."""

    producers: Sequence[ProducerConnection]
    consumers: Sequence[ConsumerConnection]


class BrokerMetrics:
    """Collects and reports the metrics of one broker. Only one thread may call `report` and `report_lags`."""

    def __init__(
        self,
        log: StateLog,
        monitor: BrokerMonitor,
        storage: Callable[[], StorageClient],
        clients: Callable[[], Clients],
        version: str,
        requests: Callable[[], Sequence[RequestFigures]],
        backlogs: BacklogWatch,
        direct: Callable[[], tuple[Mapping[str, int], int, int]],
    ) -> None:
        """`version`: raymq's version, used as the label of clients. `requests` returns metrics of the calls that wait
        for a thread of the broker's lane (direct socket connection). `direct` returns figures of the requests that are
        not stored (DirectMethods._direct_figures)."""
        self._log, self._monitor, self._storage, self._clients = log, monitor, storage, clients
        self._client_labels = {"language": LANGUAGE, "version": version}
        self._requests, self._backlogs, self._direct = requests, backlogs, direct
        self._behind: set[_Pair] = set()
        """The (group, topic) pairs that had unread messages at the last report."""
        self._times: dict[QueuePosition, int] = {}
        """Cache of messages' store times, by topic, queue and offset. A message is in the cache if it was the first
        uncommitted message of some group at the last report."""
        self._counted: tuple[BrokerState, int, _Bounds, _UnreadByPair] | None = None
        """Cache of the last report's count of unread messages: the broker state, its log position, the queues' bounds,
        and the resulting counts."""

    def report(self, reporter: Reporter) -> None:
        """Report the broker's own metrics. Before the broker's state is loaded, report only the calls that wait in the
        broker's lane (direct socket connection)."""
        report_requests(reporter, self._requests())
        self._report_direct(reporter)
        if not self._log.is_ready:
            return
        state = self._log.ready()
        reporter.gauge("raymq_broker_permission", PERM_READ | PERM_WRITE)
        topics = [topic for topic in list(state.topics) if not is_internal_topic(topic)]
        reporter.gauge("raymq_topic_number", len(topics))
        reporter.gauge("raymq_consumer_group_number", len(state.groups))
        self._report_clients(reporter)
        for (group, topic), total in self._monitor.consumed().items():
            kind = {"is_retry": topic.startswith(RETRY_PREFIX), "is_system": is_system_group(group)}
            reporter.count("raymq_messages_out", total, topic=topic, consumer_group=group, **kind)
        for (group, topic), total in self._monitor.sent_back().items():
            reporter.count("raymq_send_back_messages", total, topic=topic, consumer_group=group)
        for (group, topic), total in self._monitor.dead().items():
            reporter.count("raymq_send_to_dlq_messages", total, topic=topic, consumer_group=group)
        for (name, status), figures in self._monitor.creations.figures().items():
            reporter.buckets(name, figures, invocation_status=status)
        self._report_leases(reporter)
        self._report_backlogs(reporter)

    def report_lags(self, reporter: Reporter) -> None:
        """Report the lag of groups. Raises RaymqError if the store does not answer."""
        if not self._log.is_ready:
            return
        state, position = self._log.ready(), self._log.position
        letters = [group for group in list(state.groups) if dlq_topic(group) in state.topics]
        read = {topic for topic, _ in list(state.offsets.tables)}
        bounds = self._bounds(state, read | {dlq_topic(group) for group in letters})
        unread = self._unread(state, position, bounds)
        oldest = self._oldest(unread)
        now_ms = time.time_ns() // 1_000_000
        kept_up = [pair for pair, behind in unread.items() if not behind.messages]
        left_out = set(kept_up[KEPT_UP_MAX:]) - self._behind
        for (group, topic), behind in unread.items():
            if (group, topic) in left_out:
                continue
            labels = {
                "consumer_group": group,
                "topic": topic,
                "is_retry": topic.startswith(RETRY_PREFIX),
                "is_system": is_system_group(group),
            }
            reporter.gauge("raymq_consumer_lag_messages", behind.messages, **labels)
            stored_ms = oldest.get((group, topic))
            # After a group has caught up in a topic, report 0 once as the age of its oldest unread message. Then report
            # no age until the group lags again, because most groups have no lag.
            if stored_ms is not None or ((group, topic) in self._behind and not behind.messages):
                age_ms = 0 if stored_ms is None else max(now_ms - stored_ms, 0)
                reporter.gauge("raymq_consumer_lag_latency_milliseconds", age_ms, **labels)
        self._behind = {pair for pair, behind in unread.items() if behind.messages}
        for group in letters:
            topic = dlq_topic(group)
            waiting = unread_in(dict(state.offsets.of(group, topic)), bounds[topic]).messages
            reporter.gauge("raymq_dead_letters", waiting, consumer_group=group)

    def _unread(self, state: BrokerState, position: int, bounds: _Bounds) -> _UnreadByPair:
        """Return the messages that groups have not committed. Reuses the last result if no offset was committed and no
        message was stored since then."""
        known = self._counted
        if known is None or known[0] is not state or known[1:3] != (position, bounds):
            pairs = [(group, topic) for topic, group in list(state.offsets.tables) if _has_lag(state, group, topic)]
            unread = {pair: unread_in(dict(state.offsets.of(*pair)), bounds.get(pair[1], [])) for pair in pairs}
            known = self._counted = state, position, bounds, unread
        return known[3]

    def _report_clients(self, reporter: Reporter) -> None:
        clients = self._clients()
        reporter.gauge("raymq_producer_connections", len(clients.producers), **self._client_labels)
        counts = Counter(
            (one.consumer.group, one.consumer.consume_type, one.consumer.language) for one in clients.consumers
        )
        for (group, kind, language), count in counts.items():
            labels = {"consumer_group": group, "consume_mode": kind.lower(), "is_system": is_system_group(group)}
            # any text can be the version of a gateway's client, so it is no label
            library = {"language": language, "version": OTHER_VERSION} if language else self._client_labels
            reporter.gauge("raymq_consumer_connections", count, **labels, **library)

    def _report_leases(self, reporter: Reporter) -> None:
        now_ms = LEASE_CLOCK.now_ms()
        leased = self._log.read(
            lambda state: {pair: sum(state.pop.in_flight(*pair, now_ms).values()) for pair in state.pop.tables}
        )
        for (group, topic), messages in leased.items():
            reporter.gauge("raymq_pop_leased_messages", messages, consumer_group=group, topic=topic)

    def _report_direct(self, reporter: Reporter) -> None:
        ends, still_open, threads = self._direct()
        for end, total in ends.items():
            reporter.count("raymq_direct_requests", total, result=end)
        if ends or threads:
            reporter.gauge("raymq_direct_requests_open", still_open)
            reporter.gauge("raymq_direct_request_threads", threads)

    def _report_backlogs(self, reporter: Reporter) -> None:
        for _, backlog in self._backlogs.backlogs():
            reporter.gauge("raymq_backlog_waiting_producers", backlog.waiting, topic=backlog.topic)
            # The store's count begins again at 0 if the store is opened again; the Reporter handles this.
            reporter.count("raymq_refused_messages", backlog.refused, topic=backlog.topic)
        for (group, topic), total in self._backlogs.skipped().items():
            reporter.count("raymq_skipped_messages", total, topic=topic, consumer_group=group)

    def _bounds(self, state: BrokerState, topics: set[str]) -> _Bounds:
        known = {topic: state.topics[topic].read_queue_nums for topic in topics if topic in state.topics}
        asked = list(known.items())
        found = self._storage().queue_bounds_many(asked, STORE_READ_TIMEOUT_S) if asked else []
        bounds = dict(zip(known, found, strict=True))
        return {topic: bounds.get(topic, []) for topic in topics}

    def _oldest(self, unread: Mapping[_Pair, Unread]) -> dict[_Pair, int]:
        """Return the store time, in ms since 1970, of the oldest unread message of each group in each topic."""
        positions = {
            (group, topic): [QueuePosition(topic, queue_id, offset) for queue_id, offset in behind.firsts]
            for (group, topic), behind in unread.items()
            if behind.messages
        }
        wanted = {position for some in positions.values() for position in some}
        times = {position: stored_ms for position, stored_ms in self._times.items() if position in wanted}
        asked = [position for position in wanted if position not in times][:TIMES_MAX]
        if asked:
            found = self._storage().stored_times(asked, STORE_READ_TIMEOUT_S)
            times.update((position, stored) for position, stored in zip(asked, found, strict=True) if stored)
        self._times = times
        return {
            pair: min(times[position] for position in some)
            for pair, some in positions.items()
            if all(position in times for position in some)
        }


def _has_lag(state: BrokerState, group: str, topic: str) -> bool:
    """Return True if the lag of the group in the topic is reported. False for dead-letter topics and the server's own
    topics."""
    return (
        topic in state.topics
        and group in state.groups
        and not topic.startswith(DLQ_PREFIX)
        and not is_system_topic(topic)
        and not is_light_queue(topic)
    )
