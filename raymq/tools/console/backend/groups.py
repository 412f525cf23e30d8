"""Values about consumer groups."""

from __future__ import annotations

from dataclasses import dataclass

from raymq.common.message import MessageQueue
from raymq.common.protocol.group import GroupConfig


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group in the list. `consume_type` is "PUSH", "PULL", "POP", several of them with commas, or "" without members;
    `message_model` likewise. `lag` messages are not consumed yet, the first of them stored `lag_ms` ago; None where no
    server answered. `retries` wait to be tried again."""

    group: str
    consume_type: str = ""
    message_model: str = ""
    members: int | None = None
    lag: int | None = None
    lag_ms: int | None = None
    retries: int | None = None
    dead_letters: int | None = None
    consume_enable: bool = True


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A consumer of a group. `subscriptions`: "topic: tags", one each. `silent_s`: since its last heartbeat."""

    client_id: str
    host: str
    pid: int
    consume_type: str
    message_model: str
    subscriptions: tuple[str, ...]
    silent_s: float


@dataclass(frozen=True, slots=True)
class GroupQueue:
    """A group's progress in one queue. `owner`: the member that holds it, "" for none. `committed` is None where it has
    not committed yet."""

    queue: MessageQueue
    owner: str
    committed: int | None
    max_offset: int
    lag: int
    lag_ms: int
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class GroupInstance:
    """A push-consumer instance, as its Pull actor tells. `stuck_threads`: calls of the listener that have run for more
    than its timeout."""

    instance: str
    node: str
    queues: int
    buffered: int
    consumed: int
    failures: int
    last_error: str = ""
    stuck_threads: int = 0


@dataclass(frozen=True, slots=True)
class GroupView:
    """All about one group."""

    config: GroupConfig
    members: tuple[MemberRow, ...]
    queues: tuple[GroupQueue, ...]
    instances: tuple[GroupInstance, ...] = ()
    lag: int = 0
    lag_ms: int = 0
    retries: int = 0
    dead_letters: int = 0
    missing: tuple[str, ...] = ()
    """Parts that could not be asked for, a sentence each."""

    @property
    def group(self) -> str:
        """The group's name."""
        return self.config.group


@dataclass(frozen=True, slots=True)
class OffsetMove:
    """A queue in which a group goes on from `new` instead of `old`, which is None where it had not committed."""

    queue: MessageQueue
    old: int | None
    new: int
