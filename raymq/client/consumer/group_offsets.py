"""GroupOffsets reads and commits a consumer group's offsets at the brokers that hold the queues."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from raymq.common.errors import RaymqError
from raymq.common.message import MessageQueue
from raymq.common.parallel import map_parallel
from raymq.common.protocol.group import CommitAnswer, OffsetCommit, QueueOffset, StartOffsetQuery
from raymq.common.retry import persist_until
from raymq.remoting.broker_client import BrokerClient, broker_client

OFFSETS_TIMEOUT_S: Final = 20.0
STARTS_PER_CALL: Final = 1000
"""Maximum number of queues whose start offsets one call requests. A call for a single topic may exceed it, because it
requests all queues of the topic."""


class GroupOffsets:
    """Reads and commits the offsets of one consumer group. Thread-safe. Calls may be repeated. A call retries while a
    broker restarts; after its timeout it raises RequestTimeoutError or ServiceNotAvailableError."""

    def __init__(self, group: str) -> None:
        self.group = group

    def ensure_group(self, broker_name: str, timeout_s: float = OFFSETS_TIMEOUT_S) -> None:
        """Register the group at a broker group, unless it is registered there."""
        broker = self._broker(broker_name)
        persist_until(
            time.monotonic() + timeout_s, lambda left_s: broker.call("ensure_group", self.group, timeout_s=left_s)
        )

    def check_broadcast(
        self, broker_name: str, timeout_s: float = OFFSETS_TIMEOUT_S, topics: Sequence[str] = ()
    ) -> None:
        """Check that the group may consume in BROADCASTING mode, and may read `topics`. Raises NoPermissionError if it
        may not."""
        broker = self._broker(broker_name)
        persist_until(
            time.monotonic() + timeout_s,
            lambda left_s: broker.call("check_broadcast", self.group, list(topics), timeout_s=left_s),
        )

    def start_offset(
        self, queue: MessageQueue, query: StartOffsetQuery, generation: int, timeout_s: float = OFFSETS_TIMEOUT_S
    ) -> QueueOffset:
        """Return the group's committed offset of a queue. If the queue has no committed offset, commit the offset that
        `query` chooses, and return that offset.

        The call fences commits with an older `generation`. Generation 0, for a consumer that is no member of the group,
        fences nothing. Raises GroupNotExistError or TopicNotExistError if the group or the queue's topic does not
        exist.
        """
        broker = self._broker(queue.broker_name)
        offset: QueueOffset = persist_until(
            time.monotonic() + timeout_s,
            lambda left_s: broker.call("start_offset", self.group, queue, query, generation, timeout_s=left_s),
        )
        return offset

    def start_offsets(
        self,
        generations: Mapping[MessageQueue, int],
        query: StartOffsetQuery,
        timeout_s: float = OFFSETS_TIMEOUT_S,
    ) -> dict[MessageQueue, QueueOffset]:
        """Return the start offsets of many queues, as `start_offset` does. `generations`: the generation that granted
        each queue. The brokers are called one after another. The result omits queues whose topic does not exist, and
        queues that the group is not allowed to read; `start_offset` raises the reason. Raises GroupNotExistError if the
        group does not exist. If a broker is unreachable, its error is raised for all queues."""
        tables: dict[str, dict[str, dict[int, int]]] = {}
        for queue, generation in generations.items():
            tables.setdefault(queue.broker_name, {}).setdefault(queue.topic, {})[queue.queue_id] = generation
        deadline_s = time.monotonic() + timeout_s
        starts: dict[MessageQueue, QueueOffset] = {}
        for broker_name, table in tables.items():
            for part in _in_parts(table):
                found: dict[str, dict[int, QueueOffset]] = persist_until(
                    deadline_s, partial(self._start_offsets_at, broker_name, part, query)
                )
                for topic, by_queue in found.items():
                    starts |= {MessageQueue(topic, broker_name, q): start for q, start in by_queue.items()}
        return starts

    def _start_offsets_at(
        self, broker_name: str, table: Mapping[str, Mapping[int, int]], query: StartOffsetQuery, left_s: float
    ) -> Any:
        return self._broker(broker_name).call("start_offsets", self.group, table, query, timeout_s=left_s)

    def committed_offset(self, queue: MessageQueue, timeout_s: float = OFFSETS_TIMEOUT_S) -> int | None:
        """Return the group's committed offset of a queue; None if the group has committed no offset."""
        broker = self._broker(queue.broker_name)
        table: dict[int, int] = persist_until(
            time.monotonic() + timeout_s,
            lambda left_s: broker.call("committed_offsets", self.group, queue.topic, timeout_s=left_s),
        )
        return table.get(queue.queue_id)

    def committed_offsets(
        self, queues: Sequence[MessageQueue], timeout_s: float = OFFSETS_TIMEOUT_S
    ) -> dict[MessageQueue, int]:
        """Return the committed offsets of queues, with one call for each topic and broker. The result omits queues
        without a committed offset."""
        deadline_s = time.monotonic() + timeout_s
        found: dict[MessageQueue, int] = {}
        for broker_name, topic in sorted({(queue.broker_name, queue.topic) for queue in queues}):
            table: dict[int, int] = persist_until(
                deadline_s, partial(self._committed_at, self._broker(broker_name), topic)
            )
            found |= {MessageQueue(topic, broker_name, queue_id): offset for queue_id, offset in table.items()}
        return {queue: found[queue] for queue in queues if queue in found}

    def _committed_at(self, broker: BrokerClient, topic: str, left_s: float) -> dict[int, int]:
        table: dict[int, int] = broker.call("committed_offsets", self.group, topic, timeout_s=left_s)
        return table

    def commit_offsets(
        self, commits: Mapping[MessageQueue, OffsetCommit], timeout_s: float = OFFSETS_TIMEOUT_S
    ) -> CommitAnswer:
        """Commit offsets: for each queue, the offset of the next message to consume. The commits are durable on return,
        except for queues that the answer lists as fenced, gone or reset.

        The brokers are called at the same time. If one call fails, its error is raised; commits at the other brokers
        are durable. Repeating the call is safe.
        """
        tables: dict[str, dict[str, dict[int, OffsetCommit]]] = defaultdict(lambda: defaultdict(dict))
        for queue, commit in commits.items():
            tables[queue.broker_name][queue.topic][queue.queue_id] = commit
        plain = {name: {topic: dict(by_queue) for topic, by_queue in table.items()} for name, table in tables.items()}
        deadline_s = time.monotonic() + timeout_s
        if len(plain) < 2:
            return _merged([self._commit_at(name, table, deadline_s) for name, table in plain.items()])
        return _merged(
            map_parallel(
                lambda name: self._commit_at(name, plain[name], deadline_s),
                plain,
                threads_max=len(plain),
                name="commit",
            )
        )

    def _commit_at(
        self, broker_name: str, commits: Mapping[str, Mapping[int, OffsetCommit]], deadline_s: float
    ) -> CommitAnswer | RaymqError:
        broker = self._broker(broker_name)
        try:
            answer: CommitAnswer = persist_until(
                deadline_s, lambda left_s: broker.call("commit_offsets", self.group, commits, timeout_s=left_s)
            )
        except RaymqError as error:
            return error
        return answer

    def _broker(self, name: str) -> BrokerClient:
        return broker_client(name)


def _in_parts(table: Mapping[str, Mapping[int, int]]) -> Iterator[dict[str, Mapping[int, int]]]:
    """Split a table of queues by topic into smaller tables of about STARTS_PER_CALL queues. All queues of a topic are
    in the same table."""
    part: dict[str, Mapping[int, int]] = {}
    for topic, by_queue in table.items():
        part[topic] = by_queue
        if sum(map(len, part.values())) >= STARTS_PER_CALL:
            yield part
            part = {}
    if part:
        yield part


def _merged(answers: list[CommitAnswer | RaymqError]) -> CommitAnswer:
    """Merge the brokers' answers to a commit of offsets into one answer. Raises the first error among the
    answers."""
    reset: dict[MessageQueue, QueueOffset] = {}
    fenced: frozenset[MessageQueue] = frozenset()
    gone: frozenset[MessageQueue] = frozenset()
    stopped: dict[MessageQueue, str] = {}
    for answer in answers:
        if isinstance(answer, RaymqError):
            raise answer
        reset.update(answer.reset)
        stopped.update(answer.stopped)
        fenced, gone = fenced | answer.fenced, gone | answer.gone
    return CommitAnswer(reset, fenced, gone, stopped)
