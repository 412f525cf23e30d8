"""Administration of delayed messages that still wait: their number by delay level and by hour, and the messages that
are due next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

from raymq.client.admin.base import ADMIN_SHORT_CALL_TIMEOUT_S, AdminBase
from raymq.client.consumer.pull_once import read_alone
from raymq.client.consumer.repair_wait import is_damage, read_repaired, wait_at_stores
from raymq.common.errors import BodyUnreadableError, ServiceNotAvailableError
from raymq.common.message import PROPERTY_REAL_TOPIC, MessageExt, MessageQueue
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.numbers import POINT_IN_TIME_MS, NumberRange, bounded
from raymq.common.protocol.route import MASTER_ID, BrokerData
from raymq.common.protocol.store import DelayedInStore, QueuePosition
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients

DELAYED_LIST_MAX: Final = 1000
END_OF_TIME_MS: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class DelayedMessage:
    """A delayed message that waits until `due_ms` (ms since 1970), and is then delivered to `topic`.

    `level` is the delay level; 0 for a message with a delivery time of its own. `message` is the stored delayed
    message; if its record is damaged, `topic` is empty.
    """

    topic: str
    due_ms: int
    level: int
    message: MessageExt


@dataclass(frozen=True, slots=True)
class Delayed:
    """The delayed messages of all broker groups.

    `levels`: the number of messages for each delay level, as ``level 3``, and as ``deliver_at`` for messages with a
    delivery time of their own. `hours`: the number of messages due in each of the next 24 hours. It leaves out messages
    due in more than a day, which wait in the timer's roll queue.

    `late_ms`: for how many ms the first message is overdue; 0 if no message is overdue. `next_due`: the first messages
    of the requested period, in the order of their due times. `truncated`: True if the period has more messages.
    """

    levels: dict[str, int]
    hours: tuple[int, ...]
    late_ms: int
    next_due: tuple[DelayedMessage, ...]
    truncated: bool


class _GroupDelays(NamedTuple):
    """The delayed messages of one broker group. `found` has the first messages that are due in the requested period.
    `damaged`: the queue offsets of the damaged records among them, by delay queue."""

    counts: DelayedInStore
    found: list[DelayedMessage]
    damaged: dict[MessageQueue, list[int]]


class DelayedAdmin(AdminBase):
    """The administration call that returns the delayed messages."""

    def __init__(self, routes: RouteCache, storages: StorageClients) -> None:
        super().__init__(routes, storages)
        self._delay_repairs = wait_at_stores(lambda broker_name: self._master_of(self._routes.brokers(), broker_name))

    @bounded(begin_ms=POINT_IN_TIME_MS, end_ms=POINT_IN_TIME_MS, limit=NumberRange(1, DELAYED_LIST_MAX))
    def delayed(self, begin_ms: int = 0, end_ms: int = END_OF_TIME_MS, *, limit: int = 100) -> Delayed:
        """Return the current delayed messages: the counts of all delayed messages, and the first `limit` messages that
        are due from `begin_ms` on and before `end_ms` (ms since 1970).

        Waits a few seconds for the repair of damaged messages. A message that stays damaged is returned with its
        `body_error`. Raises InvalidArgumentError if an argument is out of range. Raises ServiceNotAvailableError or
        RequestTimeoutError while a broker group has no master.
        """

        levels: dict[str, int] = {}
        hours = [0] * 24
        late_ms, truncated = 0, False
        found: list[DelayedMessage] = []
        brokers = self._routes.brokers()
        for broker_name in sorted(brokers):
            read = partial(_read_group, self._master_of(brokers, broker_name), broker_name, begin_ms, end_ms, limit)
            group = read_repaired(read, lambda group: group.damaged, self._delay_repairs)
            for name, count in group.counts.levels.items():
                levels[name] = levels.get(name, 0) + count
            hours = [sum(pair) for pair in zip(hours, group.counts.hours, strict=True)]
            late_ms = max(late_ms, group.counts.late_ms)
            truncated = truncated or not group.counts.complete
            found += group.found
        found.sort(key=lambda one: (one.due_ms, one.message.queue, one.message.queue_offset))
        return Delayed(levels, tuple(hours), late_ms, tuple(found[:limit]), truncated or len(found) > limit)

    def _master_of(self, brokers: Mapping[str, BrokerData], broker_name: str) -> StorageClient:
        data = brokers.get(broker_name)
        if data is None or MASTER_ID not in data.storages:
            raise ServiceNotAvailableError(f"broker group {broker_name!r} has no master now; see `raymq status`")
        return self._storages.get(data.storages[MASTER_ID])


def _read_group(master: StorageClient, broker_name: str, begin_ms: int, end_ms: int, limit: int) -> _GroupDelays:
    """Ask a broker group's master for its delayed messages, and decode them."""
    counts: DelayedInStore = master.control("delayed", begin_ms, end_ms, limit, timeout_s=ADMIN_SHORT_CALL_TIMEOUT_S)
    group = _GroupDelays(counts, [], {})
    ends = accumulate(counts.sizes)
    for due_ms, position, size, end in zip(counts.due_ms, counts.positions, counts.sizes, ends, strict=True):
        queue = MessageQueue(position.topic, broker_name, position.queue_id)
        errors: list[BodyUnreadableError] = []
        record = counts.records[end - size : end]
        message = read_alone(record, queue, position.queue_offset, on_unreadable=errors.append)
        group.found.append(_delayed(due_ms, position, message))
        if any(map(is_damage, errors)):
            group.damaged.setdefault(queue, []).append(position.queue_offset)
    return group


def _delayed(due_ms: int, position: QueuePosition, message: MessageExt) -> DelayedMessage:
    topic = "" if message.record_damaged else message.system_properties.get(PROPERTY_REAL_TOPIC, message.topic)
    level = position.queue_id + 1 if position.topic == SCHEDULE_TOPIC else 0
    return DelayedMessage(topic, due_ms, level, message)
