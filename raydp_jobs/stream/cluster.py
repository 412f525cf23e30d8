"""Connects a streaming source to the cluster: finds the topics' queues and their bounds, and commits finished offsets.

Separate threads search for queues and request bounds from broker groups. So a broker group that does not answer does
not delay a query that has messages in other broker groups.

A query's finished offsets are committed to a consumer group, so that `raymq group describe` shows the query's lag. The
committed offsets are only for display: a query continues from its checkpoint, and ignores the group's offsets. A query
is not a member of the group, so its commits fence no consumer. The group should have no members.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from raydp_jobs.source.locality import preferred_hosts
from raydp_jobs.stream.source import StreamCluster
from raydp_jobs.worker_client import ClusterAddress, address_of_cluster
from raymq.client.client import Client, connect
from raymq.client.consumer.group_offsets import GroupOffsets
from raymq.client.scan.offsets import streaming_boundary
from raymq.client.scan.partitions import ScanPartition
from raymq.client.scan.queue_bounds import ClusterQueues
from raymq.client.scan.ranges import Creations, ScanSource, require_matches, select_topics
from raymq.common.errors import RaymqError, TopicNotExistError
from raymq.common.message import ConsumeFromWhere, MessageQueue
from raymq.common.names import check_group
from raymq.common.parallel import submit
from raymq.common.protocol.group import OffsetCommit, StartOffsetQuery
from raymq.common.protocol.store import QueueBounds
from raymq.common.retry import left_s
from raymq.remoting.namespaced_routes import NamespacedRoutes

DISCOVERY_INTERVAL_S: Final = 5.0
"""Interval in seconds between two searches for new queues, and for new topics that match a pattern."""
DELETED_AFTER_S: Final = 30.0
"""Time in seconds after which a topic counts as deleted if no NameServer has reported it."""
ANSWER_TIMEOUT_S: Final = 1.0
"""Maximum time in seconds that the planning of a batch waits for each broker group to return the bounds of its queues.
After this time the batch is planned without the broker group's queues."""
ASKING_THREADS_MAX: Final = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicChoice:
    """The topics that a stream reads: one or several names, or a pattern that must match the whole name."""

    topic: str | Sequence[str] | None = None
    pattern: str | None = None

    def now(self, source: ScanSource) -> list[str]:
        """Return the topics that the stream reads now: the given names, or the existing topics that match the pattern.
        The result may be empty for a pattern.

        Raises IllegalNameError or InvalidArgumentError if a name or the pattern is invalid.
        """
        try:
            return select_topics(source, self.topic, self.pattern)
        except TopicNotExistError:
            return []

    def __contains__(self, topic: str) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic == self.topic or topic in (self.topic or ())

    def __str__(self) -> str:
        if self.pattern is not None:
            return f"/{self.pattern}/"
        return self.topic if isinstance(self.topic, str) else ", ".join(self.topic or ())


class TopicCluster(StreamCluster):
    """The StreamCluster of one streaming DataFrame: a connection to the cluster for all queries of the DataFrame.
    `choice`: the topics to read.

    `starting`: the starting_… options. `group`: the consumer group to which finished offsets are committed. `client`: a
    connection to use. Without `client`, a connection is opened when it is needed, and closed with the last query.
    """

    def __init__(
        self,
        choice: TopicChoice,
        starting: Mapping[str, Any],
        *,
        group: str | None = None,
        client: Client | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice, self._starting, self._client, self._clock = choice, starting, client, clock
        self._group = None if group is None else check_group(group)
        self._commits: GroupCommits | None = None
        self._lock, self._committing = threading.Lock(), threading.Lock()
        self._connection: _Connection | None = None
        self._known: list[MessageQueue] = []
        self._looked_s = float("-inf")
        self._search: Future[list[MessageQueue]] | None = None
        self._asked: dict[str, Future[Mapping[MessageQueue, QueueBounds]]] = {}
        self._silent: set[str] = set()
        self._missing_since_s: dict[str, float] = {}

    def queues(self) -> Sequence[MessageQueue]:
        """Return the topics' queues, as found by a search at most DISCOVERY_INTERVAL_S ago. If the NameServers do not
        answer, returns the queues of the last successful search.

        The first call waits until the queues are found. It raises TopicNotExistError if a named topic does not exist.
        """
        with self._lock:
            connection = self._connected()
            if self._looked_s == float("-inf"):
                self._known = self._look(connection, tolerant=False)
                self._looked_s = self._clock()
            elif self._search is None and self._clock() >= self._looked_s + DISCOVERY_INTERVAL_S:
                self._search = submit(connection.pool, partial(self._look, connection, tolerant=True))
            elif self._search is not None and self._search.done():
                found, self._search, self._looked_s = self._search, None, self._clock()
                try:
                    self._known = found.result()
                except RaymqError as error:
                    logger.warning("%s: cannot look for new queues: %s", self._choice, error)
            return list(self._known)

    def bounds(self, queues: Sequence[MessageQueue], *, all_of_them: bool) -> Mapping[MessageQueue, QueueBounds]:
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            by_broker.setdefault(queue.broker_name, []).append(queue)
        with self._lock:
            connection = self._connected()
            for broker_name, some in by_broker.items():
                if broker_name not in self._asked:
                    self._asked[broker_name] = submit(connection.pool, partial(connection.queues.bounds, some))
            asked = {broker_name: self._asked[broker_name] for broker_name in by_broker}
        wait(asked.values(), None if all_of_them else ANSWER_TIMEOUT_S)
        found: dict[MessageQueue, QueueBounds] = {}
        for broker_name, answer in asked.items():
            found |= self._answer(broker_name, answer, all_of_them)
        return {queue: found[queue] for queue in queues if queue in found}

    def creations(self, topics: Sequence[str]) -> Creations:
        with self._lock:
            source = self._connected().queues
        try:
            return source.creations(topics)
        except RaymqError as error:
            logger.warning("%s: cannot check whether a topic was deleted and created again: %s", self._choice, error)
            return {}

    def starts(self, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, int]:
        source = self._source()
        boundary = streaming_boundary(self._starting, self._choice.now(source))
        starts = boundary.resolve(source, queues)
        if boundary.by_time and self._starting.get("starting_offsets_by_timestamp_strategy", "error") == "error":
            require_matches(boundary, starts, source.bounds(queues))
        return starts

    def deleted(self, queues: Sequence[MessageQueue]) -> Sequence[MessageQueue]:
        """Return the queues, from `queues`, whose topic counts as deleted. A topic counts as deleted if it no longer
        matches the stream's topic selection, or if it was not found for DELETED_AFTER_S."""
        with self._lock:
            there, now_s = {queue.topic for queue in self._known}, self._clock()
            for topic in there & self._missing_since_s.keys():
                del self._missing_since_s[topic]
            gone = set()
            for topic in {queue.topic for queue in queues} - there:
                since_s = self._missing_since_s.setdefault(topic, now_s)
                if topic not in self._choice or now_s >= since_s + DELETED_AFTER_S:
                    gone.add(topic)
        return [queue for queue in queues if queue.topic in gone]

    def absent_brokers(self) -> Sequence[str]:
        with self._lock:
            source = self._connected().queues
        return sorted({name for topic in self._choice.now(source) for name in source.absent_brokers(topic)})

    def hosts(self, parts: Sequence[ScanPartition]) -> Sequence[Sequence[str]]:
        with self._lock:
            routes = self._connected().routes
        try:
            return preferred_hosts(routes, parts)
        except RaymqError as error:
            logger.warning(
                "%s: cannot find the nodes of the stores; a batch is read on any node: %s", self._choice, error
            )
            return [[] for _ in parts]

    def commit(self, offsets: Mapping[MessageQueue, int]) -> bool:
        if self._group is None:
            return True
        with self._lock:
            names = self._connected().client.names
        with self._committing:
            if self._commits is None:
                self._commits = GroupCommits(names.wrap(self._group))
            return self._commits.commit({names.queue(queue): offset for queue, offset in offsets.items()})

    def address(self) -> ClusterAddress:
        """Return the cluster address to which Spark workers connect."""
        with self._lock:
            return address_of_cluster(self._connected().client)

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            self._search, self._asked, self._looked_s = None, {}, float("-inf")
        if connection is not None:
            connection.close(keep=self._client)

    def _answer(
        self, broker_name: str, answer: Future[Mapping[MessageQueue, QueueBounds]], needed: bool
    ) -> Mapping[MessageQueue, QueueBounds]:
        """Return the queue bounds from the answer of a broker group, or an empty mapping if the request has failed or
        has no answer yet.

        With `needed`, raises the error of a failed request. A request without an answer still returns an empty mapping.
        """
        if not answer.done():
            problem = f"no answer in {ANSWER_TIMEOUT_S:g} s"
        else:
            with self._lock:
                if self._asked.get(broker_name) is answer:
                    del self._asked[broker_name]
            try:
                found = answer.result()
            except RaymqError as error:
                if needed:
                    raise
                problem = str(error)
            else:
                self._silent.discard(broker_name)
                return found
        if broker_name not in self._silent:
            self._silent.add(broker_name)
            logger.warning(
                "%s: batches continue without new messages of broker group %s: %s", self._choice, broker_name, problem
            )
        return {}

    def _look(self, connection: _Connection, *, tolerant: bool) -> list[MessageQueue]:
        """Search for the topics of the stream that exist now, and return their queues.

        If a named topic does not exist, raises TopicNotExistError; with `tolerant`, omits the topic. A topic pattern
        never raises this error.
        """
        found: list[MessageQueue] = []
        for topic in self._choice.now(connection.queues):
            try:
                found += connection.queues.queues(topic)
            except TopicNotExistError:
                if not tolerant and self._choice.pattern is None:
                    raise
        return sorted(found)

    def _source(self) -> ScanSource:
        with self._lock:
            return self._connected().queues

    def _connected(self) -> _Connection:
        """Return the connection to the cluster, and open it if necessary. The caller must hold the lock."""
        if self._connection is None:
            self._connection = _Connection(self._client if self._client is not None else connect())
        return self._connection


class _Connection:
    """A client of the cluster, and the threads that send requests through this client."""

    def __init__(self, client: Client) -> None:
        self.client, self.routes = client, NamespacedRoutes(client.routes, client.names)
        self.queues = ClusterQueues(client.routes, client.storages, client.names)
        self.pool = ThreadPoolExecutor(ASKING_THREADS_MAX, "stream-asks")

    def close(self, keep: Client | None) -> None:
        """Stop the threads of this connection and close its client, unless the client is `keep`. Running calls finish
        normally."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.client is not keep:
            self.client.close()


COMMIT_BUDGET_S: Final = 5.0
"""Maximum time in seconds for which a commit of offsets may delay the streaming query. If a commit fails, the next
commit also covers its offsets."""
COMMIT_PAUSE_S: Final = 1.0
NOT_A_MEMBER: Final = 0
"""The generation number of an offset commit by a program that is not a member of the group. Such a commit does not
fence other commits, and is never fenced."""
_FROM_FIRST: Final = StartOffsetQuery(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)


class GroupCommits:
    """Commits offsets for one consumer group, and creates the group if it does not exist. Not thread-safe."""

    def __init__(self, group: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._offsets, self._clock = GroupOffsets(check_group(group)), clock
        self._versions: dict[MessageQueue, int] = {}
        self._try_again_s = float("-inf")

    def commit(self, offsets: Mapping[MessageQueue, int]) -> bool:
        """Commit, for each queue, the offset of the next message that the query will read. A commit may move the offset
        back, because it must show the query's position.

        Returns False, with a logged warning, if the brokers could not commit all offsets within COMMIT_BUDGET_S.
        Further commits are then skipped for COMMIT_PAUSE_S.
        """
        if self._clock() < self._try_again_s:
            return False
        deadline_s = time.monotonic() + COMMIT_BUDGET_S
        try:
            self._learn_versions(sorted(offsets.keys() - self._versions.keys()), deadline_s)
            if reset := self._try(offsets, deadline_s):
                logger.warning(
                    "group %s: the group's offsets in queue %s were reset, but the query continues from its "
                    "checkpoint and commits the checkpoint's offsets. To start at other offsets, start the query "
                    "with a new checkpoint and starting_offsets",
                    self._offsets.group,
                    ", ".join(map(str, sorted(reset))),
                )
                self._try({queue: offsets[queue] for queue in reset}, deadline_s)
        except RaymqError as error:
            logger.warning("group %s: offsets are not committed yet: %s", self._offsets.group, error)
            # Drop the cached reset versions (numbers that change with each offset reset), because the group may have
            # been deleted.
            self._versions.clear()
            self._try_again_s = self._clock() + COMMIT_PAUSE_S
            return False
        return True

    def _try(self, offsets: Mapping[MessageQueue, int], deadline_s: float) -> set[MessageQueue]:
        """Commit offsets once. Returns the queues whose commit was refused because their offset was reset. Stores the
        reset versions of these queues for the next attempt."""
        commits = {
            queue: OffsetCommit(offset, NOT_A_MEMBER, self._versions[queue], backwards=True)
            for queue, offset in offsets.items()
            if queue in self._versions
        }
        answer = self._offsets.commit_offsets(commits, left_s(deadline_s))
        self._versions |= {queue: reset.reset_version for queue, reset in answer.reset.items()}
        return set(answer.reset)

    def _learn_versions(self, queues: list[MessageQueue], deadline_s: float) -> None:
        for broker_name in sorted({queue.broker_name for queue in queues}):
            self._offsets.ensure_group(broker_name, left_s(deadline_s))
        starts = self._offsets.start_offsets(dict.fromkeys(queues, NOT_A_MEMBER), _FROM_FIRST, left_s(deadline_s))
        self._versions |= {queue: start.reset_version for queue, start in starts.items()}
