"""All metrics of a broker at one moment, for `raymq top` and the console, with few calls to the store.

To compute the age of unread messages, the store must read the log once for each group and topic. So only the OLDEST_MAX
largest lags have an age.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from actors.broker.master_store import MasterStore
from actors.core.broker.progress import Lag, lag_in
from actors.core.broker.state import BrokerState
from raymq.common.names import dlq_topic, is_internal_topic, retry_topic
from raymq.common.protocol.route import TopicConfig
from raymq.common.protocol.stats import BrokerReadings, GroupReading, GroupTotals, TopicReading, TopicStats
from raymq.common.protocol.store import QueueBounds, QueuePosition, StoreStatistics

PAIRS_MAX: Final = 4000
"""Maximum number of (group, topic) pairs in one result of `take_readings`."""
QUEUES_PER_CALL: Final = 4000
OLDEST_MAX: Final = 128
_PAIR = tuple[str, str]
_BOUNDS = Mapping[str, Mapping[int, QueueBounds]]


def take_readings(
    state: BrokerState,
    store: MasterStore,
    consumed: Mapping[_PAIR, int],
    stats: Callable[[str], TopicStats],
    *,
    with_pairs: bool = True,
) -> BrokerReadings:
    """Return the metrics of a broker's topics and groups.

    `consumed`: numbers of consumed messages by group and topic. `stats` returns the statistics of a topic. If
    `with_pairs` is False, only each group's totals are returned, not its figures for each topic. Raises RaymqError if
    the store does not answer.
    """
    statistics: StoreStatistics = store.control("statistics")
    known, groups = dict(state.topics), dict(state.groups)
    topics = {name: config for name, config in known.items() if not is_internal_topic(name)}
    of_groups = {
        name: known[name] for group in groups for name in (retry_topic(group), dlq_topic(group)) if name in known
    }
    bounds = _bounds(store, {**topics, **of_groups})
    pairs = [(group, topic) for topic, group in list(state.offsets.tables) if topic in topics]
    lags = {pair: lag_in(state.offsets.committed(*pair), bounds[pair[1]]) for pair in pairs}
    ages = _ages_ms(store, lags)
    readings = {}
    for name, config in topics.items():
        puts, rates = statistics.topics.get(name), stats(name)
        readings[name] = TopicReading(
            puts.messages if puts else 0,
            puts.bytes if puts else 0,
            config.read_queue_nums,
            config.perm,
            _held(bounds, name),
            rates.messages.minute_tps,
            rates.bytes.minute_tps,
        )
    out: dict[str, int] = {}
    for (group, _), messages in consumed.items():
        out[group] = out.get(group, 0) + messages
    own: dict[str, list[tuple[int, int | None]]] = {}
    for pair, lag in lags.items():
        own.setdefault(pair[0], []).append((lag.messages, ages.get(pair)))
    totals = {
        group: _totals(state, bounds, group, config.consume_enable, out.get(group, 0), own.get(group, ()))
        for group, config in groups.items()
    }
    told = {
        pair: GroupReading(consumed.get(pair, 0), lags[pair].messages, ages.get(pair) if lags[pair].messages else 0)
        for pair in (sorted(pairs)[:PAIRS_MAX] if with_pairs else ())
    }
    return BrokerReadings(readings, told, len(pairs) - len(told), totals)


def _totals(
    state: BrokerState, bounds: _BOUNDS, group: str, enabled: bool, out: int, own: Sequence[tuple[int, int | None]]
) -> GroupTotals:
    """Sum up the metrics of a group over all topics. `own`: for each topic, the number of the group's unread messages
    and the age of the oldest in ms (None if unknown).

    The totals include messages that were sent back and wait in the group's retry topic: the messages after the group's
    committed offsets, or all messages of the retry topic if the group has committed none.
    """
    retries = retry_topic(group)
    lag = sum(messages for messages, _ in own)
    ages = [age_ms for messages, age_ms in own if messages and age_ms is not None]
    return GroupTotals(
        out,
        lag,
        max(ages, default=None if lag else 0),
        lag_in(state.offsets.committed(group, retries), bounds.get(retries, {})).messages,
        _held(bounds, dlq_topic(group)),
        enabled,
    )


def _held(bounds: _BOUNDS, topic: str) -> int:
    return sum(one.max_offset - one.min_offset for one in bounds.get(topic, {}).values())


def _bounds(store: MasterStore, topics: Mapping[str, TopicConfig]) -> dict[str, dict[int, QueueBounds]]:
    """Return the bounds of all queues of these topics, by topic and queue id."""
    queues = [(topic, number) for topic, config in topics.items() for number in range(config.read_queue_nums)]
    found: dict[str, dict[int, QueueBounds]] = {topic: {} for topic in topics}
    for start in range(0, len(queues), QUEUES_PER_CALL):
        part = queues[start : start + QUEUES_PER_CALL]
        for (topic, number), bounds in zip(part, store.bounds_of_queues(part), strict=True):
            found[topic][number] = bounds
    return found


def _ages_ms(store: MasterStore, lags: Mapping[_PAIR, Lag]) -> dict[_PAIR, int]:
    """Return, for the (group, topic) pairs with the largest lags, the age in ms of the first unread message. Makes one
    call to the store."""
    largest = sorted((pair for pair, lag in lags.items() if lag.messages), key=lambda pair: -lags[pair].messages)
    asked = largest[:OLDEST_MAX]
    positions = [QueuePosition(pair[1], lags[pair].queue_id, lags[pair].offset) for pair in asked]
    if not positions:
        return {}
    times_ms = store.call(lambda storage, left_s: storage.stored_times(positions, left_s))
    now_ms = time.time_ns() // 1_000_000
    return {pair: max(now_ms - at_ms, 0) for pair, at_ms in zip(asked, times_ms, strict=True) if at_ms}
