"""Administration: what arrives in a topic, read again and again without a group, for somebody who watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from raymq.client.admin.base import AdminBase
from raymq.client.consumer.pull_once import read_fetched, stored_times
from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.names import check_topic
from raymq.common.numbers import NOT_NEGATIVE, NumberRange, bounded
from raymq.common.parallel import map_parallel
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting.storage_clients import call_master

TAIL_TIMEOUT_S: Final = 3.0
"""Bounds the call to one broker group."""
TAIL_MESSAGES_MAX: Final = 1024
TAIL_MAX_BYTES: Final = 4 * 1024 * 1024
"""The most bytes of records that one broker group answers."""
TAIL_BROKERS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Arrived:
    """Messages that have arrived in a topic, oldest first. `skipped` are left out for the bounds. `positions`: the
    offsets to go on from, by queue."""

    messages: tuple[MessageExt, ...]
    positions: dict[MessageQueue, int]
    skipped: int = 0


class TailAdmin(AdminBase):
    """The call of those who watch a topic. It changes nothing."""

    @bounded(positions=NOT_NEGATIVE, max_messages=NumberRange(1, TAIL_MESSAGES_MAX))
    def tail(
        self, topic: str, positions: Mapping[MessageQueue, int] | None = None, *, max_messages: int = 100
    ) -> Arrived:
        """The messages behind `positions`, without waiting for more: at most `max_messages`, the newest of those read,
        and 4 MiB of each broker group; all others are skipped. None finds the ends of the queues, and no message.

        One call for each broker group, all at the same time. One that does not answer keeps its positions; the error is
        raised if none does. TopicNotExistError, InvalidArgumentError.
        """
        queues: dict[str, list[MessageQueue]] = {}
        for queue in self._routes.get(check_topic(topic)).subscribe_queues:
            queues.setdefault(queue.broker_name, []).append(queue)

        def read(own: Sequence[MessageQueue]) -> list[FetchResult] | RaymqError:
            try:
                return self._read_behind(own, positions, max_messages)
            except RaymqError as error:
                return error

        answers = map_parallel(read, queues.values(), threads_max=TAIL_BROKERS_AT_ONCE, name="tail")
        failures = [answer for answer in answers if isinstance(answer, RaymqError)]
        if failures and (positions is None or len(failures) == len(answers)):
            raise failures[0]
        following = dict(positions or {})
        found: list[tuple[int, MessageExt]] = []
        skipped = 0
        for own, answer in zip(queues.values(), answers, strict=True):
            if isinstance(answer, RaymqError):
                continue
            for queue, result in zip(own, answer, strict=True):
                following[queue] = result.max_offset
                if positions is not None:
                    skipped += result.max_offset - result.next_offset
                    bounds = positions.get(queue, -1), result.next_offset
                    arrived = [one.message for one in read_fetched(result.records, queue, *bounds)]
                    found += zip(stored_times(arrived), arrived, strict=True)
        found.sort(key=itemgetter(0))
        newest = tuple(message for _, message in found[-max_messages:])
        return Arrived(newest, following, skipped + len(found) - len(newest))

    def _read_behind(
        self, queues: Sequence[MessageQueue], positions: Mapping[MessageQueue, int] | None, max_messages: int
    ) -> list[FetchResult]:
        """One result for each of the queues, which are of one broker group; only offsets without positions."""
        requests = [
            FetchRequest(queue.topic, queue.queue_id, (positions or {}).get(queue, 0), max_messages) for queue in queues
        ]
        max_bytes = 0 if positions is None else TAIL_MAX_BYTES
        return call_master(
            self._routes,
            self._storages,
            queues[0],
            TAIL_TIMEOUT_S,
            lambda storage, left_s: storage.fetch(requests, max_bytes, 0.0, left_s),
        )
