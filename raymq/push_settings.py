"""How a push consumer consumes: the values its Pull and Listener actors are started with (spec/messaging.md §5.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

from raymq.errors import InvalidArgumentError
from raymq.group_info import StartOffsetQuery
from raymq.subscription import Subscription


@dataclass(frozen=True, slots=True)
class PushSettings:
    """One push consumer. `batch_max`: messages per listener call at most. `threads`: listener calls at a time per
    instance, each for another queue. `threshold_count`, `threshold_bytes`: what may wait per queue."""

    group: str
    subscriptions: tuple[Subscription, ...]
    start: StartOffsetQuery = field(default_factory=StartOffsetQuery)
    batch_max: int = 1
    threads: int = 20
    threshold_count: int = 1000
    threshold_bytes: int = 100 * 1024 * 1024

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("batch_max", self.batch_max, 1, 1024),
            ("threads", self.threads, 1, 1000),
            ("threshold_count", self.threshold_count, 1, 65535),
            ("threshold_bytes", self.threshold_bytes, 1 << 20, 1 << 30),
        ):
            if not low <= value <= high:
                raise InvalidArgumentError(f"{name} must be {low} to {high}, not {value}")

    def subscription(self, topic: str) -> Subscription:
        return next(subscription for subscription in self.subscriptions if subscription.topic == topic)
