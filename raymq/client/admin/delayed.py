"""Administration of delayed messages that still wait: their number by delay level and by hour, and the messages that
are due next."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from raymq.client.admin.base import ADMIN_SHORT_CALL_TIMEOUT_S, AdminBase
from raymq.client.consumer.pull_once import read_alone
from raymq.common.java_text import parse_number
from raymq.common.message import PROPERTY_DELAY, PROPERTY_REAL_TOPIC, MessageExt, MessageQueue
from raymq.common.names import SCHEDULE_TOPIC
from raymq.common.numbers import POINT_IN_TIME_MS, NumberRange, bounded
from raymq.common.protocol.route import MASTER_ID
from raymq.common.protocol.store import DelayedInStore

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


class DelayedAdmin(AdminBase):
    """The administration call that returns the delayed messages."""

    @bounded(begin_ms=POINT_IN_TIME_MS, end_ms=POINT_IN_TIME_MS, limit=NumberRange(1, DELAYED_LIST_MAX))
    def delayed(self, begin_ms: int = 0, end_ms: int = END_OF_TIME_MS, *, limit: int = 100) -> Delayed:
        """Return the current delayed messages: the counts of all delayed messages, and the first `limit` messages that
        are due from `begin_ms` on and before `end_ms` (ms since 1970).

        Raises InvalidArgumentError if an argument is out of range. Raises ServiceNotAvailableError or
        RequestTimeoutError while a broker group has no master.
        """

        levels: dict[str, int] = {}
        hours = [0] * 24
        late_ms, truncated = 0, False
        found: list[DelayedMessage] = []
        for broker_name, data in sorted(self._routes.brokers().items()):
            storage = self._storages.get(data.storages[MASTER_ID])
            part: DelayedInStore = storage.control(
                "delayed", begin_ms, end_ms, limit, timeout_s=ADMIN_SHORT_CALL_TIMEOUT_S
            )
            for name, count in part.levels.items():
                levels[name] = levels.get(name, 0) + count
            hours = [sum(pair) for pair in zip(hours, part.hours, strict=True)]
            late_ms, truncated = max(late_ms, part.late_ms), truncated or not part.complete
            queue, ends = MessageQueue("", broker_name, -1), accumulate(part.sizes)
            records = [part.records[end - size : end] for size, end in zip(part.sizes, ends, strict=True)]
            messages = [read_alone(record, queue) for record in records]
            found += [_delayed(due_ms, message) for due_ms, message in zip(part.due_ms, messages, strict=True)]
        found.sort(key=lambda one: (one.due_ms, one.message.queue, one.message.queue_offset))
        return Delayed(levels, tuple(hours), late_ms, tuple(found[:limit]), truncated or len(found) > limit)


def _delayed(due_ms: int, message: MessageExt) -> DelayedMessage:
    properties = message.system_properties
    level = parse_number(properties.get(PROPERTY_DELAY)) or 0 if message.topic == SCHEDULE_TOPIC else 0
    return DelayedMessage(properties.get(PROPERTY_REAL_TOPIC, message.topic), due_ms, level, message)
