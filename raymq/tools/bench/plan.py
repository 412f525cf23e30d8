"""Plans a run of `raymq bench`: its phases, the limits of each phase, and the schedule of sends at a fixed rate.

Every phase has a limit in messages and a limit in time, so that a run is short and leaves few bytes in the log. No
function here has a clock or a connection.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.numbers import NumberRange

_STAMP: Final = struct.Struct(">QQ")
"""First bytes of a body in the phase DELAY: the run's token, and the scheduled time of the send in ns."""
BENCH_MESSAGES: Final = NumberRange(1, 10_000_000)
BENCH_SECONDS: Final = NumberRange(1.0, 600.0)
BENCH_SIZE: Final = NumberRange(_STAMP.size, MAX_MESSAGE_SIZE_BYTES)
BENCH_THREADS: Final = NumberRange(1, 64)
BENCH_BATCH: Final = NumberRange(1, 10_000)

SECONDS_DEFAULT: Final = 14.0
"""Default limit, in s, of all phases together. With the connection and the disk, a run takes about 20 s."""
SECONDS_OF_MESSAGES: Final = 120.0
"""Default limit, in s, of all phases together if the user gives the number of messages."""
BATCH_DEFAULT: Final = 500
BATCH_BYTES_DEFAULT: Final = 4 << 20
BATCH_BYTES_MAX: Final = 64 << 20
DELAY_RATE_MAX: Final = 1000.0
"""Highest default rate, in messages per second, of the phase DELAY."""
QUEUES_MIN: Final = 4
CALL_BYTES: Final = 16 << 20
"""Maximum number of bytes of bodies that one read of a consumer returns."""
CALL_MESSAGES: Final = 5000


class BenchPhase(StrEnum):
    """The phases of a run, in order. The value is the phase's name in the table."""

    PUBLISH = "send one by one"
    BATCH = "send batches"
    CONSUME = "poll and commit"
    RECEIVE = "receive and acknowledge"
    DELAY = "delay from send to poll"


TIME_SHARES: Final = {
    BenchPhase.PUBLISH: 0.25,
    BenchPhase.BATCH: 0.2,
    BenchPhase.CONSUME: 0.15,
    BenchPhase.RECEIVE: 0.15,
    BenchPhase.DELAY: 0.25,
}
"""The share of each phase in the time of a run."""
PHASE_BYTES: Final = {BenchPhase.PUBLISH: 256 << 20, BenchPhase.BATCH: 512 << 20, BenchPhase.DELAY: 128 << 20}
"""Maximum number of bytes of bodies that each sending phase sends if the user gives no number of messages."""
PHASE_BYTES_MAX: Final = 4 << 30
"""Maximum number of bytes of bodies that each sending phase sends if the user gives the number of messages."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `raymq bench`. None: the default. `topic`: an existing topic to use instead of a temporary topic.
    `size`: bytes of a body. `rate`: messages per second of all producers together, for the phases PUBLISH and DELAY."""

    topic: str | None = None
    messages: int | None = None
    seconds: float | None = None
    size: int = 1024
    producers: int = 1
    consumers: int = 1
    batch: int | None = None
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class PhaseLimit:
    """The limit of a phase: the phase ends after `messages` messages or after `seconds`, whichever is first."""

    messages: int
    seconds: float

    def share(self, index: int, count: int) -> int:
        """Return the number of messages of thread `index` of `count` threads. All threads together have `messages`."""
        return self.messages // count + (index < self.messages % count)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A run: its options with all defaults filled in, and the limit of each phase.

    `rate`: messages per second of the phases PUBLISH and DELAY. None: PUBLISH sends one message after another, and
    `delay_rate` chooses the rate of DELAY. `queues`: the number of queues of the temporary topic. `call_messages`: the
    maximum number of messages that one read of a consumer returns.
    """

    topic: str | None
    size: int
    producers: int
    consumers: int
    batch: int
    queues: int
    call_messages: int
    rate: float | None
    limits: dict[BenchPhase, PhaseLimit]

    @property
    def bytes_max(self) -> int:
        """The maximum number of bytes of bodies that the run sends."""
        return self.size * sum(self.limits[phase].messages for phase in PHASE_BYTES)

    def delay_rate(self, sends_per_s: float) -> float:
        """Return the messages per second of the phase DELAY. `sends_per_s`: what the phase PUBLISH reached.

        The default is half of `sends_per_s`, and at most DELAY_RATE_MAX. At a higher rate than the cluster reaches, the
        delays would be the waiting times of late sends.
        """
        return self.rate or min(DELAY_RATE_MAX, max(sends_per_s / 2, 1.0))


def plan_run(options: BenchOptions) -> BenchPlan:
    """Return the plan of a run. Raises InvalidArgumentError if the options together ask for too many bytes."""
    size = options.size
    batch = options.batch or max(1, min(BATCH_DEFAULT, BATCH_BYTES_DEFAULT // size))
    if batch * size > BATCH_BYTES_MAX:
        raise InvalidArgumentError(
            f"a batch of {batch:,} messages of {size:,} bytes has more than {BATCH_BYTES_MAX >> 20} MiB: choose a "
            "smaller --batch or --size"
        )
    if options.messages is not None and options.messages * size > PHASE_BYTES_MAX:
        raise InvalidArgumentError(
            f"{options.messages:,} messages of {size:,} bytes are more than {PHASE_BYTES_MAX >> 30} GiB: choose "
            "smaller --messages or --size"
        )
    total_s = options.seconds
    if total_s is None:
        total_s = SECONDS_DEFAULT if options.messages is None else SECONDS_OF_MESSAGES
    limits = {
        phase: PhaseLimit(_messages_of(phase, options, share * total_s), share * total_s)
        for phase, share in TIME_SHARES.items()
    }
    return BenchPlan(
        topic=options.topic,
        size=size,
        producers=options.producers,
        consumers=options.consumers,
        batch=batch,
        queues=max(QUEUES_MIN, options.producers, options.consumers),
        call_messages=max(1, min(CALL_MESSAGES, CALL_BYTES // size)),
        rate=options.rate,
        limits=limits,
    )


def _messages_of(phase: BenchPhase, options: BenchOptions, seconds: float) -> int:
    """Return the maximum number of messages of a phase."""
    if options.messages is not None:
        most = options.messages
    else:
        most = max(1, min(int(BENCH_MESSAGES.high), PHASE_BYTES.get(phase, PHASE_BYTES_MAX) // options.size))
    rates = {BenchPhase.PUBLISH: options.rate, BenchPhase.DELAY: options.rate or DELAY_RATE_MAX}
    rate = rates.get(phase)
    return most if rate is None else max(1, min(most, math.ceil(rate * seconds)))


@dataclass(frozen=True, slots=True)
class SendSchedule:
    """The times of sends at a fixed rate, which `producers` threads share.

    A latency counts from the scheduled time, not from the time of the call. So messages that wait because earlier sends
    were slow count with their wait (the correction for coordinated omission).
    """

    rate: float
    producers: int = 1

    def due_s(self, producer: int, number: int) -> float:
        """Return the scheduled time of message `number` of thread `producer`, in s since the start of the phase."""
        return (number * self.producers + producer) / self.rate


def stamped_body(token: int, due_ns: int, filler: bytes) -> bytes:
    """Return a body of the length of `filler` that begins with the run's token and the scheduled time of its send."""
    return _STAMP.pack(token, due_ns) + filler[_STAMP.size :]


def due_ns_of(body: bytes, token: int) -> int | None:
    """Return the scheduled time, in ns, of a body that `stamped_body` made with the same token. Returns None for any
    other body, such as a message of another program in a shared topic."""
    if len(body) < _STAMP.size:
        return None
    found, due_ns = _STAMP.unpack_from(body)
    return due_ns if found == token else None
