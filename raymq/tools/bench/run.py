"""Runs `raymq bench` on a connected client: creates the temporary topic, runs the phases, removes the topic and the
groups.

Only temporary objects are changed. A user's own topic (`BenchOptions.topic`) gets messages, but is neither created nor
deleted, and its consumer groups are not touched.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

from raymq.common.errors import GroupNotExistError, RaymqError, TopicNotExistError
from raymq.common.message import ConsumeFromWhere, Message, MessageQueue
from raymq.tools.bench.latencies import LatencySummary, summarize
from raymq.tools.bench.plan import BenchPhase, BenchPlan, SendSchedule
from raymq.tools.bench.workload import Crew, PhaseLoop, Tally

if TYPE_CHECKING:
    from raymq.client.cluster.launcher import ProgressCallback

BENCH_PREFIX: Final = "raymq-bench-"
"""First characters of the names of temporary topics and groups."""
BENCH_PRODUCERS: Final = "raymq-bench"
BENCH_SEND_TIMEOUT_S: Final = 10.0
LAST_MESSAGES_S: Final = 10.0
"""How long the phase DELAY waits for the last messages after the last send, in s."""
RECEIVE_AT_ONCE: Final = 512
RATE_MESSAGES_MIN: Final = 20
"""Number of messages from which a rate that was not reached gets a note."""

LoopWork = Callable[[Any, Tally, int], None]
"""The work of a thread, with its producer or consumer, its counts and its index."""


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """The result of a phase. `bytes`: of the bodies. `seconds`: from the start of the phase to its last message.
    `latency`: of the calls, or in the phase DELAY from the scheduled send to the poll; None without calls. `note`: why
    the figures are less than the plan; else empty. `rate`: the messages per second of sends at a fixed rate, else
    None."""

    phase: BenchPhase
    messages: int
    bytes: int
    seconds: float
    latency: LatencySummary | None = None
    note: str = ""
    rate: float | None = None

    @property
    def messages_per_s(self) -> float:
        """Messages per second; 0.0 for a phase without messages."""
        return self.messages / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Bytes of bodies per second; 0.0 for a phase without messages."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


class TemporaryObjects:
    """The topic and the groups that a run creates and removes. `left` has the objects that were not removed: the
    kind, the name, and the command that removes the object."""

    def __init__(self, admin: Any, namespace: str = "") -> None:
        """`namespace`: the namespace of the client, for the commands; empty for no namespace."""
        self._admin = admin
        self._suffix = f" --namespace {namespace}" if namespace else ""
        self.left: dict[tuple[str, str], str] = {}

    def add_topic(self, name: str, queues: int) -> None:
        """Create a topic. The topic counts as left from the beginning of the call, because an interrupted call may
        have created it."""
        self.left["topic", name] = f"raymq topic delete {name} --yes{self._suffix}"
        self._admin.create_topic(name, queues=queues)

    def add_group(self, name: str) -> str:
        """Note the name of a group that the run's consumers create. Returns the name."""
        self.left["group", name] = f"raymq group delete {name} --yes{self._suffix}"
        return name

    def remove(self) -> list[str]:
        """Delete the groups and the topic. Returns the errors. After an interrupt or an error, `left` has the rest."""
        errors = []
        for kind, name in reversed(list(self.left)):
            try:
                if kind == "group":
                    self._admin.delete_group(name)
                else:
                    self._admin.delete_topic(name)
            except (TopicNotExistError, GroupNotExistError):
                pass  # the object was never created, or an earlier call has deleted it
            except RaymqError as error:
                errors.append(f"{kind} {name!r} could not be deleted: {error}")
                continue
            del self.left[kind, name]
        return errors

    def rest(self) -> list[str]:
        """Return a text for each object that is left, with the command that removes the object."""
        return [f"{kind} {name!r} is left; delete it: {remedy}" for (kind, name), remedy in self.left.items()]


class BenchRun:
    """One run of the phases of a plan. `results` has the finished phases. `errors` has the reason of a failed phase,
    and the errors of the removal."""

    def __init__(self, client: Any, plan: BenchPlan, progress: ProgressCallback) -> None:
        """`client`: a connected raymq.Client."""
        self._client, self._plan, self._progress = client, plan, progress
        self.objects = TemporaryObjects(client.admin, client.names.name)
        self.results: list[PhaseResult] = []
        self.errors: list[str] = []
        self._name = BENCH_PREFIX + secrets.token_hex(6)
        self.topic = self._name if plan.topic is None else plan.topic
        self.queues = 0
        self._token = secrets.randbits(64)
        self._body = os.urandom(plan.size)

    def run(self) -> None:
        """Run all phases, then remove the temporary objects, also after an error or an interrupt.

        A RaymqError of a phase is stored in `errors`, and ends the run. Every other exception is raised, after the
        removal.
        """
        try:
            self._run_phases()
        finally:
            self._progress("deleting the temporary topic")
            self.errors += self.objects.remove()

    def _run_phases(self) -> None:
        admin, phase = self._client.admin, "preparing the topic"
        try:
            if self._plan.topic is None:
                self.objects.add_topic(self.topic, self._plan.queues)
            starts = {one.queue: one.max_offset for one in admin.describe_topic(self.topic)}
            self.queues = len(starts)
            for phase, work in (
                (BenchPhase.PUBLISH, self._publish),
                (BenchPhase.BATCH, self._publish_batches),
                (BenchPhase.CONSUME, lambda: self._consume(starts)),
                (BenchPhase.RECEIVE, self._receive),
                (BenchPhase.DELAY, self._delays),
            ):
                self._progress(f"{phase}: starting")
                self.results.append(work())
        except RaymqError as error:
            self.errors.append(f"{phase}: {error}")

    def _publish(self) -> PhaseResult:
        plan, phase = self._plan, BenchPhase.PUBLISH
        schedule = None if plan.rate is None else SendSchedule(plan.rate, plan.producers)
        with self._producers() as producers:
            loop = PhaseLoop(plan.limits[phase].seconds)
            tallies = self._send_all(phase, loop, producers, self._sends(loop, phase, schedule, None))
        return _result(phase, loop, tallies, _rate_note(tallies, loop, plan.rate), plan.rate)

    def _publish_batches(self) -> PhaseResult:
        plan, phase = self._plan, BenchPhase.BATCH
        limit, message = plan.limits[phase], Message(self.topic, self._body)

        def send(producer: Any, tally: Tally, index: int) -> None:
            loop.send_batches(producer, tally, limit.share(index, plan.producers), message, plan.batch)

        with self._producers() as producers:
            loop = PhaseLoop(limit.seconds)
            tallies = self._send_all(phase, loop, producers, send)
        return _result(phase, loop, tallies)

    def _sends(self, loop: PhaseLoop, phase: BenchPhase, schedule: SendSchedule | None, token: int | None) -> LoopWork:
        """Return the work of a producer that sends its share of a phase's messages one by one."""
        limit, producers = self._plan.limits[phase], self._plan.producers

        def send(producer: Any, tally: Tally, index: int) -> None:
            count = limit.share(index, producers)
            loop.send_each(producer, tally, count, self.topic, self._body, index=index, schedule=schedule, token=token)

        return send

    def _send_all(self, phase: BenchPhase, loop: PhaseLoop, producers: Sequence[Any], work: LoopWork) -> list[Tally]:
        """Run the sending loops of a phase to their end. Returns their counts."""
        with Crew(loop) as crew:
            threads, tallies = _start_all(crew, producers, work)
            # A loop ends by itself at its limit. The longer time is for its last call.
            crew.wait(
                lambda: not any(thread.is_alive() for thread in threads),
                loop.end_s + 2 * BENCH_SEND_TIMEOUT_S,
                lambda: self._progress(f"{phase}: {_sum(tallies):,} sent"),
            )
        return tallies

    def _consume(self, starts: dict[MessageQueue, int]) -> PhaseResult:
        plan, phase = self._plan, BenchPhase.CONSUME

        def read(consumer: Any, tally: Tally, index: int) -> None:
            loop.poll_and_commit(consumer, tally, plan.call_messages)

        with self._pollers(list(starts)) as consumers:
            for consumer in consumers:
                for queue in consumer.assignment():
                    consumer.seek(queue, starts[queue])
            loop = PhaseLoop(plan.limits[phase].seconds)
            return self._read_all(phase, loop, consumers, read)

    def _receive(self) -> PhaseResult:
        plan, phase = self._plan, BenchPhase.RECEIVE
        group, first = self.objects.add_group(f"{self._name}-receive"), ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET

        def read(consumer: Any, tally: Tally, index: int) -> None:
            loop.receive_and_acknowledge(consumer, tally, min(plan.call_messages, RECEIVE_AT_ONCE))

        with ExitStack() as opened:
            consumers = [
                opened.enter_context(self._client.simple_consumer(group, consume_from=first))
                for _ in range(plan.consumers)
            ]
            for consumer in consumers:
                consumer.subscribe(self.topic)
            loop = PhaseLoop(plan.limits[phase].seconds)
            return self._read_all(phase, loop, consumers, read)

    def _read_all(self, phase: BenchPhase, loop: PhaseLoop, consumers: Sequence[Any], work: LoopWork) -> PhaseResult:
        """Run the reading loops of a phase until they have read what the earlier phases sent, or to the phase's limit.
        Messages of other programs in a shared topic count, too."""
        sent = sum(one.messages for one in self.results if one.phase in (BenchPhase.PUBLISH, BenchPhase.BATCH))
        with Crew(loop) as crew:
            _, tallies = _start_all(crew, consumers, work)
            crew.wait(
                lambda: _sum(tallies) >= sent,
                loop.end_s,
                lambda: self._progress(f"{phase}: {_sum(tallies):,} of {sent:,} read"),
            )
        read = _sum(tallies)
        return _result(phase, loop, tallies, f"the time allowed {read:,} of {sent:,} messages" * (read < sent))

    def _delays(self) -> PhaseResult:
        plan, phase = self._plan, BenchPhase.DELAY
        [published] = (one for one in self.results if one.phase is BenchPhase.PUBLISH)
        rate = plan.delay_rate(published.messages_per_s)
        schedule = SendSchedule(rate, plan.producers)

        def watch(consumer: Any, tally: Tally, index: int) -> None:
            loop.watch_delays(consumer, tally, self._token, plan.call_messages)

        queues = [one.queue for one in self._client.admin.describe_topic(self.topic)]
        with self._pollers(queues) as consumers, self._producers() as producers:
            for consumer in consumers:
                for queue in consumer.assignment():
                    consumer.seek_to_end(queue)
            loop = PhaseLoop(plan.limits[phase].seconds)
            with Crew(loop) as crew:
                _, received = _start_all(crew, consumers, watch)
                threads, sent = _start_all(crew, producers, self._sends(loop, phase, schedule, self._token))

                def show() -> None:
                    self._progress(f"{phase}: {_sum(received):,} received")

                def are_sent() -> bool:
                    return not any(thread.is_alive() for thread in threads)

                crew.wait(are_sent, loop.end_s + 2 * BENCH_SEND_TIMEOUT_S, show)
                crew.wait(lambda: _sum(received) >= _sum(sent), loop.clock_s() + LAST_MESSAGES_S, show)
        missing = _sum(sent) - _sum(received)
        if missing > 0:
            self.errors.append(
                f"{phase}: {missing:,} of {_sum(sent):,} messages did not arrive within {LAST_MESSAGES_S:g} s after "
                "the last send; see `raymq status`"
            )
        return _result(phase, loop, received, _rate_note(sent, loop, rate), rate)

    @contextmanager
    def _producers(self) -> Iterator[list[Any]]:
        """Yield the producers of a phase."""
        with ExitStack() as opened:
            yield [
                opened.enter_context(self._client.producer(BENCH_PRODUCERS, send_timeout_s=BENCH_SEND_TIMEOUT_S))
                for _ in range(self._plan.producers)
            ]

    @contextmanager
    def _pollers(self, queues: Sequence[MessageQueue]) -> Iterator[list[Any]]:
        """Yield the pull consumers of a phase, among which the queues are divided. No consumer is without a queue."""
        group, count = self.objects.add_group(f"{self._name}-poll"), min(self._plan.consumers, len(queues))
        with ExitStack() as opened:
            consumers = []
            for index in range(count):
                consumer = opened.enter_context(self._client.pull_consumer(group, auto_commit=False))
                consumer.assign(sorted(queues)[index::count])
                consumers.append(consumer)
            yield consumers


def _start_all(crew: Crew, each: Sequence[Any], work: LoopWork) -> tuple[list[Thread], list[Tally]]:
    """Start a thread with its own Tally for each producer or consumer. Returns the threads and their counts."""
    tallies = [Tally() for _ in each]
    threads = [
        crew.start(partial(work, one, tally, index))
        for index, (one, tally) in enumerate(zip(each, tallies, strict=True))
    ]
    return threads, tallies


def _sum(tallies: Sequence[Tally]) -> int:
    return sum(tally.messages for tally in tallies)


def _result(
    phase: BenchPhase, loop: PhaseLoop, tallies: Sequence[Tally], note: str = "", rate: float | None = None
) -> PhaseResult:
    last_s = max((tally.last_s for tally in tallies if tally.messages), default=loop.start_s)
    return PhaseResult(
        phase,
        _sum(tallies),
        sum(tally.bytes for tally in tallies),
        last_s - loop.start_s,
        summarize(tally.latencies_s for tally in tallies),
        note,
        rate,
    )


def _rate_note(sent: Sequence[Tally], loop: PhaseLoop, rate: float | None) -> str:
    """Return a note if the sends reached less than nine tenths of their fixed rate, else an empty text. The rate of a
    few messages says nothing."""
    found = _result(BenchPhase.PUBLISH, loop, sent).messages_per_s
    if rate is None or _sum(sent) < RATE_MESSAGES_MIN or found >= 0.9 * rate:
        return ""
    return f"{found:,.0f} messages/s instead of {rate:,.0f}: the times include the wait of each late send"
