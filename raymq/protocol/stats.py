"""Statistics of topics and groups, as a broker counts them (spec/messaging.md §9.6)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Figures:
    """A counter: `total` since the broker started, the sum and the rate per second over the last minute, hour, day."""

    total: int = 0
    minute: int = 0
    hour: int = 0
    day: int = 0
    minute_tps: float = 0.0
    hour_tps: float = 0.0
    day_tps: float = 0.0


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Messages that were put into a topic, and bytes of their records."""

    messages: Figures = Figures()
    bytes: Figures = Figures()


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Messages of a topic that a group has committed, and messages that it has sent back."""

    messages: Figures = Figures()
    sent_back: Figures = Figures()


T = TypeVar("T", Figures, TopicStats, GroupStats)


def add_up(kind: type[T], parts: Iterable[T]) -> T:
    """The figures of several brokers as one."""
    table = list(parts)
    values = {}
    for name in (field.name for field in fields(kind)):
        column = [getattr(part, name) for part in table]
        values[name] = add_up(Figures, column) if column and isinstance(column[0], Figures) else sum(column)
    return kind(**values) if table else kind()
