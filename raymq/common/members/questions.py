"""Queries to one live client about its members of a consumer group, and the client's answers.

    admin ── ask_client ──▶ Broker ◀── take_questions (a long poll) ── client
                              ▲ ─────── answer_question ◀──────────────┘

A broker cannot call a client program. So a client sends a long poll for queries to one of the brokers (actors.members).
The broker stores no query on disk. It drops a query if the administrator disconnects. A query stays unanswered if the
client dies.

The module also collects the stacks of this process's threads, which show administrators why a consumer hangs.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol, runtime_checkable

import msgspec

from raymq.common.message import MessageQueue

QUESTION_WAIT_S: Final = 20.0
"""Time in seconds for which a broker holds a client's long poll for queries. After this time the client polls
again."""
MEMBER_ANSWER_MAX_BYTES: Final = 4 << 20
"""Maximum size, in bytes, of a client's answer to an administrator's query. The broker forwards the answer to the
administrator."""

QuestionKind = Literal["running", "consume"]


@dataclass(frozen=True, slots=True)
class Question:
    """An administrator's query to a client about its members of `group`, or only about the member `member`.

    Kind "running": report the members' current state, with the stacks of their threads if `stacks` is True. Kind
    "consume": one member calls its listener with the message in `record`, which is a whole record of `broker_name`'s
    log. `ticket`: the query's id, which the broker assigns.
    """

    kind: QuestionKind
    group: str
    member: str = ""
    stacks: bool = False
    record: bytes = b""
    broker_name: str = ""
    ticket: str = ""


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """A thread of a member's process, and the thread's stack: one line of text per frame, the innermost frame
    last."""

    name: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunningQueue:
    """The state of a queue that is assigned to a member of a consumer group. `state`: the state of the queue at the
    member, for example "paused" or "forbidden".

    `fetch_offset`: the next offset to fetch. Messages before `commit_offset` are consumed. Messages before
    `committed_offset` are committed (None: no commit yet). The member's process queue buffers `buffered` messages of
    `buffered_bytes` bytes, and the program processes `in_flight` of them. `trouble`: the reason of the last failed
    message.
    """

    queue: MessageQueue
    state: str
    fetch_offset: int
    commit_offset: int
    committed_offset: int | None
    buffered: int
    buffered_bytes: int
    in_flight: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class RunningInfo:
    """A report of a consumer group's member about itself.

    `client_id`, `host` and `pid` belong to the member's client. `listener_pid`: the process that runs a push consumer's
    listener (0: unknown). `stacks`: the threads of the listener's process, or of the client's process if the member has
    no listener process. `subscriptions`: maps a topic to its filter expression. `queues`: empty for a simple consumer,
    which has no assigned queues. `rates`: the last minute's rates by topic, under RocketMQ's names: PULL_TPS,
    CONSUME_OK_TPS and CONSUME_FAILED_TPS in messages per second, CONSUME_RT in ms. `consumed` and `failures`: numbers
    of messages since the member's start. `trouble`: the reason why the member makes no progress.
    """

    client_id: str
    host: str
    pid: int
    member: str
    group: str
    consume_type: str
    message_model: str
    subscriptions: Mapping[str, str]
    queues: tuple[RunningQueue, ...] = ()
    rates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    consumed: int | None = None
    failures: int | None = None
    suspended: bool = False
    trouble: str = ""
    listener_pid: int = 0
    stacks: tuple[ThreadStack, ...] = ()


@dataclass(frozen=True, slots=True)
class DirectConsumption:
    """The outcome of one listener call that an administrator requested for one message. The call commits nothing, and
    sends no failed message back to the broker.

    `status`: CONSUME_SUCCESS, RECONSUME_LATER, or EXCEPTION if the listener raised an exception. `error`: the reason of
    a failure, with the traceback. `took_ms`: the duration of the listener's call.
    """

    client_id: str
    member: str
    status: str
    error: str = ""
    took_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """A client's answer to an administrator's query. `error`: the reason why the client could not carry out the query;
    empty if it could."""

    error: str = ""
    running: tuple[RunningInfo, ...] = ()
    consumed: DirectConsumption | None = None


@runtime_checkable
class Answers(Protocol):
    """Protocol of consumers that answer administrators' queries. Any thread may call the methods; a call may take some
    seconds."""

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """Return the consumer's report about itself. Raises RaymqError if the consumer cannot make the report."""

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Call the consumer's listener with the message in `record`, and commit nothing. Raises InvalidArgumentError if
        the consumer has no listener. Raises another RaymqError if the call fails."""


def encode_answer(answer: MemberAnswer) -> bytes:
    """Encode a client's answer. If the encoded answer is too long, the stacks are omitted first, and then the
    queues."""
    encoded = msgspec.msgpack.encode(answer)
    if len(encoded) > MEMBER_ANSWER_MAX_BYTES:
        trouble = "the stacks are left out, because they are too long"
        shorter = tuple(replace(one, stacks=(), trouble=one.trouble or trouble) for one in answer.running)
        answer = replace(answer, running=shorter)
        encoded = msgspec.msgpack.encode(answer)
    if len(encoded) > MEMBER_ANSWER_MAX_BYTES:
        trouble = "the queues are left out, because their number is too large"
        shorter = tuple(replace(one, queues=(), trouble=one.trouble or trouble) for one in answer.running)
        encoded = msgspec.msgpack.encode(replace(answer, running=shorter))
    return encoded


def decode_answer(encoded: bytes) -> MemberAnswer:
    """Decode a client's answer. Raises msgspec.DecodeError if `encoded` is not a valid answer."""
    return msgspec.msgpack.decode(encoded, type=MemberAnswer)


THREADS_MAX: Final = 200
"""Maximum number of threads whose stacks a report contains. If a process has more threads, the oldest threads are
reported."""
FRAMES_MAX: Final = 60
"""Maximum number of stack frames per reported thread; the innermost frames are kept."""


def thread_stacks() -> tuple[ThreadStack, ...]:
    """Return the stacks of this process's threads, except the calling thread, sorted by name. The threads keep running
    while their stacks are collected one after another."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found = [(ident, frame) for ident, frame in sys._current_frames().items() if ident != own][:THREADS_MAX]
    stacks = []
    for ident, frame in found:
        summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES_MAX, lookup_lines=False)
        frames = tuple(f"{one.filename}:{one.lineno} {one.name}" for one in reversed(summary))
        stacks.append(ThreadStack(names.get(ident, f"thread {ident}"), frames))
    return tuple(sorted(stacks, key=lambda stack: stack.name))
