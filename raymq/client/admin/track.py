"""Administration: the state of one message in each consumer group.

    a dead letter with its id in %DLQ%group     ▶ dead
    a retry with its id in %RETRY%group         ▶ in retry, or consumed by a retry
    before the committed offset                 ▶ consumed; filtered out if no member's tags want the message
    at the committed offset or after it         ▶ not yet

A group commits one offset per queue, so "consumed" means that the group's committed offset is after the message. The
key index finds the retries. While the retries are stored, the state is exact. After retention has deleted them, the
state is "consumed".
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from raymq.client.admin.messages import MessageAdmin
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import InvalidArgumentError, RaymqError, TopicNotExistError
from raymq.common.message import MessageExt
from raymq.common.names import dlq_topic, retry_topic
from raymq.common.protocol.clients import ConsumerConnection


class TrackState(StrEnum):
    """The state of a message in a group."""

    CONSUMED = "consumed"
    NOT_YET = "not yet"
    RETRYING = "retrying"
    DEAD = "dead"
    FILTERED = "filtered out"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class MessageTrack:
    """The state of a message in a consumer group. `retries`: the number of retries. `detail`: an explanation in
    words."""

    group: str
    state: TrackState
    retries: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tries:
    """The copies of a message in a group's retry and dead-letter topics. `dead`: True if the newest copy is a dead
    letter. `retries`: the number of retries. `committed`: True if the group's committed offset in the retry topic is
    after the newest copy."""

    retries: int = 0
    dead: bool = False
    committed: bool = False


def judge(group: str, *, offset: int, committed: int | None, tries: Tries | None, wanted: bool | None) -> MessageTrack:
    """Return the state in `group` of a message. `offset`: the message's offset in its queue. `committed`: the group's
    committed offset in this queue.

    `tries`: the known retries; None if no retry is stored. `wanted`: True if the subscription of some member accepts
    the message; None if that is unknown.
    """
    if tries is not None and tries.dead:
        return MessageTrack(group, TrackState.DEAD, tries.retries, "it is in the group's dead letters")
    if tries is not None and not tries.committed:
        return MessageTrack(group, TrackState.RETRYING, tries.retries, f"it failed {tries.retries} times")
    if tries is not None:
        return MessageTrack(group, TrackState.CONSUMED, tries.retries, f"after {tries.retries} retries")
    if committed is None:
        return MessageTrack(group, TrackState.UNKNOWN, 0, "the group has not committed an offset of this queue")
    if wanted is False:
        return MessageTrack(group, TrackState.FILTERED, 0, "no subscription of the group selects it")
    if offset < committed:
        return MessageTrack(group, TrackState.CONSUMED, 0, f"the group has committed up to offset {committed}")
    return MessageTrack(group, TrackState.NOT_YET, 0, f"the group continues at offset {committed}")


class TrackAdmin(MessageAdmin):
    """The administration call that returns the state of a message in each group."""

    def message_track(self, message: MessageExt) -> list[MessageTrack]:
        """Return the state of a message in each group of its topic, sorted by group: consumed, not yet, in a retry,
        dead, or filtered out. If the retries in a group cannot be read, the state is "unknown", with the reason.

        Raises TopicNotExistError if the message's topic does not exist. Raises ServiceNotAvailableError or
        RequestTimeoutError while the message's broker is unreachable.
        """
        offsets: dict[str, dict[int, int]] = self._call_broker(message.broker_name, "topic_offsets", message.topic)
        connections: list[ConsumerConnection] = self._call_broker(message.broker_name, "consumer_connections", None)
        groups = {one.consumer.group for one in connections if message.topic in one.consumer.subscriptions}
        tracks = []
        for group in sorted(groups | offsets.keys()):
            committed = offsets.get(group, {}).get(message.queue_id)
            wanted = _wanted(message, [one for one in connections if one.consumer.group == group])
            try:
                tries = self._tries(group, message)
            except RaymqError as error:
                tracks.append(MessageTrack(group, TrackState.UNKNOWN, 0, str(error)))
                continue
            tracks.append(judge(group, offset=message.queue_offset, committed=committed, tries=tries, wanted=wanted))
        return tracks

    def _tries(self, group: str, message: MessageExt) -> Tries | None:
        """Find the copies of a message in the group's retry and dead-letter topics. Returns None if no copy is
        stored."""
        dead = self._copies(dlq_topic(group), message)
        again = self._copies(retry_topic(group), message)
        newest = max([*dead, *again], key=lambda copy: copy.store_timestamp_ms, default=None)
        if newest is None:
            return None
        if newest.topic == dlq_topic(group):
            return Tries(newest.reconsume_times, dead=True)
        offsets: dict[str, dict[int, int]] = self._call_broker(newest.broker_name, "topic_offsets", newest.topic)
        at = offsets.get(group, {}).get(newest.queue_id)
        return Tries(newest.reconsume_times, committed=at is not None and newest.queue_offset < at)

    def _copies(self, topic: str, message: MessageExt) -> list[MessageExt]:
        with suppress(TopicNotExistError):
            found = self.query_by_id(topic, message.message_id)
            return [copy for copy in found if copy.store_timestamp_ms >= message.store_timestamp_ms]
        return []


def _wanted(message: MessageExt, members: Iterable[ConsumerConnection]) -> bool | None:
    """Return True if the subscription of some member accepts the message. Returns None if no member subscribes to the
    message's topic, or if a subscription does not filter by tags."""
    expressions = [
        one.consumer.subscriptions[message.topic] for one in members if message.topic in one.consumer.subscriptions
    ]
    answers = []
    for expression in expressions:
        if expression.startswith(("SQL92:", "predicate ")):
            return None
        try:
            answers.append(Subscription.parse(message.topic, expression).matches(message.tags))
        except InvalidArgumentError:
            return None
    return any(answers) if answers else None
