"""Values about messages: those that are browsed, tailed, tracked, dead or delayed, and who sends them.

A message itself is a `raymq.common.message.MessageExt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raymq.client.admin.dead_letters import LetterPlace
from raymq.client.admin.delayed import DelayedMessage
from raymq.common.message import MessageExt, MessageQueue


@dataclass(frozen=True, slots=True)
class BrowseQuery:
    """The messages of a topic that a page wants: those with offsets from `begin_offset` on in one `queue`, or stored
    from `begin_ms` on and before `end_ms` (ms since 1970), or the newest ones if neither is given.

    `tags` is a tag expression; `contains` a text within the body. `cursor`, of an earlier page, goes on behind it. At
    most `limit` messages come, after at most `max_scanned` records or `max_ms` milliseconds.
    """

    topic: str
    queue: MessageQueue | None = None
    begin_ms: int | None = None
    end_ms: int | None = None
    begin_offset: int | None = None
    newest_first: bool = True
    tags: str = "*"
    contains: str = ""
    limit: int = 50
    max_scanned: int = 10_000
    max_ms: int = 5_000
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class MessagePage:
    """Messages, and how they were found: `scanned` records were looked at. `cursor` goes on behind them, None at the
    end; `truncated`: a bound ended the search before the end of what was asked for."""

    messages: tuple[MessageExt, ...]
    cursor: str | None = None
    scanned: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message that is to be sent. `delay_ms` 0 sends it at once."""

    topic: str
    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    delay_ms: int = 0


@dataclass(frozen=True, slots=True)
class SentMessage:
    """A message that was sent: its unique id, its record's id, and its place."""

    message_id: str
    offset_message_id: str
    queue: MessageQueue
    queue_offset: int
    status: str = "SEND_OK"


@dataclass(frozen=True, slots=True)
class TailBatch:
    """Messages behind the positions that were asked for; `positions` go on behind them, one per queue. `skipped`
    messages were there, too, and are left out for the bound."""

    messages: tuple[MessageExt, ...]
    positions: Mapping[MessageQueue, int]
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class DeadLetterView:
    """A dead letter: the message as stored in the dead-letter topic; `topic`, the one that it was sent to. The reason
    of its last failure is its system property DLQ_ORIGIN_ERROR."""

    message: MessageExt
    topic: str
    replayed: bool = False


@dataclass(frozen=True, slots=True)
class DeadLetterPage:
    """Dead letters, oldest first. `cursor` goes on behind them, None at the end."""

    letters: tuple[DeadLetterView, ...]
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class LetterReplayed:
    """The result of bringing one dead letter back; `error` is empty on success."""

    place: LetterPlace
    message_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class DelayedView:
    """Messages that wait. `levels`: how many, by level, "deliver_at" for times of their own; `hours`: how many become
    due in each of the next 24 hours, None where that is not known. `late_ms`: how late the latest delivery is.
    `next_due`: the first ones, in their order; `truncated`: there are more."""

    levels: Mapping[str, int]
    next_due: tuple[DelayedMessage, ...] = ()
    hours: tuple[int, ...] | None = None
    late_ms: int = 0
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class ProducerClient:
    """A client that produces in a group, as its heartbeats tell. `topics`: that it has sent to, where known."""

    client_id: str
    host: str
    pid: int
    group: str
    silent_s: float
    topics: tuple[str, ...] = ()
