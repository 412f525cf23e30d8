"""SimpleSettings are the settings of a simple consumer; SimpleOptions are the keyword arguments that users
pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

from raymq.common.errors import InvalidArgumentError, check_option_names
from raymq.common.message import ConsumeFromWhere
from raymq.common.names import check_group
from raymq.common.protocol.group import StartOffsetQuery


class SimpleOptions(TypedDict, total=False):
    """The keyword arguments of `Client.simple_consumer` and `Client.async_simple_consumer`; SimpleSettings explains
    them."""

    consume_from: ConsumeFromWhere
    consume_timestamp_ms: int
    ordered: bool | None
    auto_renew: bool


@dataclass(frozen=True, slots=True)
class SimpleSettings:
    """The settings of one simple consumer. `start`: where the group starts in a queue in which it has committed
    nothing. `ordered`: True for order mode. A queue then delivers no further messages, to any member, until its
    received messages are acknowledged or returned. None: order mode as the group's setting `ordered` says, or else in
    topics of message type FIFO. `auto_renew`: True to renew the leases of received messages until they are acknowledged
    or their invisible time is changed, for at most 3 hours (renewal.py)."""

    group: str
    start: StartOffsetQuery = field(default_factory=StartOffsetQuery)
    ordered: bool | None = None
    auto_renew: bool = False

    def __post_init__(self) -> None:
        check_group(self.group)
        if self.ordered is not None and not isinstance(self.ordered, bool):
            raise InvalidArgumentError(f"ordered must be True, False or None, not {self.ordered!r}")
        if not isinstance(self.auto_renew, bool):
            raise InvalidArgumentError(f"auto_renew must be a bool, not {self.auto_renew!r}")

    @classmethod
    def of(cls, group: str, **options: Unpack[SimpleOptions]) -> SimpleSettings:
        """Create settings from keyword arguments. Raises TypeError for an unknown option, IllegalNameError if the group
        name is illegal, and InvalidArgumentError if a value is invalid."""
        check_option_names("a simple consumer", options, SimpleOptions.__annotations__)
        values: dict[str, Any] = dict(options)
        where = values.pop("consume_from", ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET)
        start = StartOffsetQuery(where, values.pop("consume_timestamp_ms", 0))
        return cls(group, start=start, **values)
