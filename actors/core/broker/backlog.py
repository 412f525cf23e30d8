"""Decides what a broker sends to its store about bounded topics, and how far groups skip if old messages are dropped.

The bound is computed from the topics' attributes and the committed offsets, which the broker stores. So a new broker
process, or a new master, arrives at the same bound without anything else.

Dropping never deletes bytes: the broker moves a group's committed offset forward, as an operator's reset does. Members
of the group continue at the new offset, and the skipped messages stay readable until the retention time. A group skips
to KEPT_PARTS of the limit, so that a steady overflow moves its members once per eighth of the limit, not at each
measurement. The longest queues skip first: afterwards no queue has more than a common number of messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

from actors.core.broker.state import BrokerState, Change
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.attributes import TopicAttributes
from raymq.common.protocol.bounds import BOUND_ATTRIBUTES, BacklogPolicy, BoundedTopic, TopicBacklog, share_of
from raymq.common.protocol.route import TopicConfig, parse_order_config

KEPT_PARTS: Final = Fraction(7, 8)
"""The part of its limit that a group keeps when it skips its oldest messages."""


def bounded_topics(state: BrokerState, broker_name: str) -> list[BoundedTopic]:
    """Return the bounds of all bounded topics of a broker group, with the offsets that the counted groups have
    committed. Topics with invalid attributes, which another version may have stored, are left out."""
    found = []
    for config in list(state.topics.values()):
        if any(name in config.attributes for name in BOUND_ATTRIBUTES):
            bound = _bound_of(state, config, broker_name)
            found += [] if bound is None else [bound]
    return found


def _bound_of(state: BrokerState, config: TopicConfig, broker_name: str) -> BoundedTopic | None:
    try:
        attributes = TopicAttributes.parse(config.attributes)
        layout = parse_order_config(config.layout) if config.layout else {}
    except InvalidArgumentError:
        return None
    bound = attributes.bound
    if bound is None:
        return None

    def share(limit: int | None) -> int | None:
        return None if limit is None else share_of(limit, broker_name, layout)

    return BoundedTopic(
        config.topic,
        config.read_queue_nums,
        share(bound.max_messages),
        share(bound.max_bytes),
        str(bound.policy),
        attributes.has_inner_batches,
        {group: state.offsets.committed(group, config.topic) for group in bound.groups},
    )


def kept_messages(bound: BoundedTopic, backlog: TopicBacklog) -> int | None:
    """Return how many messages of a topic a group may keep; None if nothing is dropped, because of the policy or
    because the backlog is within the limits. A limit in bytes is converted with the backlog's average size."""
    if bound.policy != BacklogPolicy.DROP:
        return None
    kept: list[int] = []
    if bound.max_messages is not None and backlog.messages > bound.max_messages:
        kept.append(int(bound.max_messages * KEPT_PARTS))
    if bound.max_bytes is not None and backlog.bytes > bound.max_bytes:
        kept.append(int(bound.max_bytes * KEPT_PARTS) * backlog.messages // backlog.bytes)
    return max(min(kept), 1) if kept else None


def skip_targets(
    committed: Mapping[int, int], bounds: Sequence[tuple[int, int]], kept: int
) -> dict[int, tuple[int, int]]:
    """Return the queues in which a group must skip messages so that at most `kept` messages stay before it: for each,
    the first skipped offset and the new offset. `bounds`: the first and the end offset of the topic's queues 0, 1 ….

    Offsets never go back, and deleted messages do not count as skipped.
    """
    starts = {q: max(committed.get(q, 0), first) for q, (first, _) in enumerate(bounds)}
    lengths = {q: max(end - starts[q], 0) for q, (_, end) in enumerate(bounds)}
    left, level = kept, 0
    by_length = sorted(lengths.items(), key=lambda one: one[1])
    allowed: dict[int, int] = {}
    for number, (queue_id, length) in enumerate(by_length):
        level = left // (len(by_length) - number)
        allowed[queue_id] = min(length, level)
        left -= allowed[queue_id]
    return {q: (starts[q], bounds[q][1] - allowed[q]) for q, length in sorted(lengths.items()) if allowed[q] < length}


def decide_skip(
    state: BrokerState, group: str, topic: str, bounds: Sequence[tuple[int, int]], kept: int
) -> tuple[Change | None, int]:
    """Return the record that lets a group skip its oldest messages in a topic, and the number of skipped messages. The
    record is None if there is nothing to skip, or if the group or the topic does not exist any more."""
    if group not in state.groups or topic not in state.topics:
        return None, 0
    there = bounds[: state.topics[topic].read_queue_nums]
    targets = skip_targets(state.offsets.committed(group, topic), there, kept)
    if not targets:
        return None, 0
    change = state.decide_reset(group, topic, {queue_id: end for queue_id, (_, end) in targets.items()})
    return change, sum(end - first for first, end in targets.values())
