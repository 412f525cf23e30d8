"""Questions to one live client about its members of a consumer group, and the answers, as they travel.

    admin ── ask_client ──▶ Broker ◀── take_questions (a long poll) ── client
                              ▲ ─────── answer_question ◀──────────────┘

A broker cannot call a program, so a client asks one of the brokers for questions, and the broker holds that call until
there is one (actors.members). Nothing of it is kept: a question whose asker is gone is dropped, and one whose client
dies gets no answer. A change of what members tell about themselves belongs here.

The stacks of this process's threads, for administrators who ask why a consumer stands still.
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
"""How long a broker holds a client's call for questions; then the client calls again."""
MEMBER_ANSWER_MAX_BYTES: Final = 4 << 20
"""The longest answer that a broker passes on."""

QuestionKind = Literal["running", "consume"]


@dataclass(frozen=True, slots=True)
class Question:
    """A question to a client about its members of `group`, or the one called `member`.

    "running": what they do now, with the stacks of their threads if `stacks`. "consume": have one of them call its
    listener with the message in `record`, a whole record of the log of `broker_name`. `ticket` names the question; the
    broker gives it.
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
    """A thread of a member's process, and its stack: a line of text for each frame, the innermost last."""

    name: str
    frames: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunningQueue:
    """A queue that a member holds. `state` says if it is read, or why not.

    The member reads on at `fetch_offset`; messages before `commit_offset` are consumed, those before `committed_offset`
    committed (None: nothing yet). `buffered` messages of `buffered_bytes` are in the member's process queue,
    `in_flight` of them with the program. `trouble`: why the last message that failed did.
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
    """A member of a group, by its own account.

    `client_id`, `host` and `pid` are its client's; `listener_pid` is the process that runs a push consumer's listener
    (0: none is known), and `stacks` are that process's threads, or the client's. `subscriptions`: topic to expression.
    `queues` is empty for a simple consumer, which holds none. `rates`, by topic, are those of the last minute under
    RocketMQ's names: PULL_TPS, CONSUME_OK_TPS and CONSUME_FAILED_TPS in messages a second, CONSUME_RT in ms.
    `consumed` and `failures` count messages since the member began. `trouble` is the reason why it does not go on.
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
    """The outcome of a listener call with one message, for an administrator: nothing is committed or sent back for it.

    `status` is CONSUME_SUCCESS or RECONSUME_LATER, or EXCEPTION where the listener raised; `error` is the reason of a
    failure, with the traceback. `took_ms`: the time in the listener.
    """

    client_id: str
    member: str
    status: str
    error: str = ""
    took_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class MemberAnswer:
    """The answer of a client: `error` is empty, or why there is none."""

    error: str = ""
    running: tuple[RunningInfo, ...] = ()
    consumed: DirectConsumption | None = None


@runtime_checkable
class Answers(Protocol):
    """A consumer that answers questions. Both calls may come from any thread, and may take some seconds."""

    def running_info(self, client_id: str, host: str, *, stacks: bool) -> RunningInfo:
        """The consumer by its own account, now. RaymqError."""

    def consume_directly(self, client_id: str, record: bytes, broker_name: str) -> DirectConsumption:
        """Call its listener with the message in `record`, and commit nothing. InvalidArgumentError for a consumer
        without a listener; RaymqError."""


def encode_answer(answer: MemberAnswer) -> bytes:
    """An answer as it travels: one that is too long comes without its stacks, and then without its queues."""
    encoded = msgspec.msgpack.encode(answer)
    if len(encoded) > MEMBER_ANSWER_MAX_BYTES:
        trouble = "the stacks are left out: they are too long"
        shorter = tuple(replace(one, stacks=(), trouble=one.trouble or trouble) for one in answer.running)
        answer = replace(answer, running=shorter)
        encoded = msgspec.msgpack.encode(answer)
    if len(encoded) > MEMBER_ANSWER_MAX_BYTES:
        trouble = "the queues are left out: there are too many"
        shorter = tuple(replace(one, queues=(), trouble=one.trouble or trouble) for one in answer.running)
        encoded = msgspec.msgpack.encode(replace(answer, running=shorter))
    return encoded


def decode_answer(encoded: bytes) -> MemberAnswer:
    """The answer in what travelled. msgspec.DecodeError if it is none."""
    return msgspec.msgpack.decode(encoded, type=MemberAnswer)


THREADS_MAX: Final = 200
"""The most threads whose stacks are told: those that began first."""
FRAMES_MAX: Final = 60
"""The most frames of a thread: the innermost ones."""


def thread_stacks() -> tuple[ThreadStack, ...]:
    """The stacks of the threads of this process, sorted by name, but for the thread that asks. They are taken one
    after another while the threads run on."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    found = [(ident, frame) for ident, frame in sys._current_frames().items() if ident != own][:THREADS_MAX]
    stacks = []
    for ident, frame in found:
        summary = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES_MAX, lookup_lines=False)
        frames = tuple(f"{one.filename}:{one.lineno} {one.name}" for one in reversed(summary))
        stacks.append(ThreadStack(names.get(ident, f"thread {ident}"), frames))
    return tuple(sorted(stacks, key=lambda stack: stack.name))
