"""Decides whether a store accepts messages for bounded topics, and which waiting producer gets the next room.

Without a clock or threads of its own. The broker measures each bounded topic's backlog about twice a second and sends
it (`TopicBounds.change`). A measurement gives a ceiling for a counter of stored messages: counter + limit - backlog. So
an append costs one comparison, and an old measurement is never too generous: consumers can only have made room since.
Three things may exceed the limit: a group's offset that an operator moves back, delayed messages and transactions that
were accepted before, and one append that alone is larger than the limit, which is accepted if the backlog is empty.

    no room    the producer is refused with TopicFullError, and takes a place in a queue
    room       reserved for the waiting producers in their order; the first that does not fit keeps all later ones out,
               so large appends do not starve. No other producer overtakes
    place      lost if the producer does not try again within PLACE_S

A store that was opened, or that became the master, does not have a measurement yet. Until the first one it refuses
messages for bounded topics with SystemBusyError, so a failover cannot exceed a limit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from actors.core.replica.deleted_topics import real_topics
from raymq.common.delay import names_real_topic
from raymq.common.errors import RaymqError, SystemBusyError, TopicFullError
from raymq.common.message import PROPERTY_INNER_NUM
from raymq.common.protocol.bounds import BacklogPolicy, BoundedTopic, TopicBacklog
from raymq.records.format.dispatch import dispatch_view
from raymq.records.format.encode import EncodedBatch

PLACE_S: Final = 3.0
"""Time in seconds for which a producer keeps its place, and its reserved room, without trying again."""
WAITING_PRODUCERS_MAX: Final = 10_000
"""Maximum number of producers that wait for room in one topic. Further producers are refused without a place."""
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 1.0
RETRIES_PER_S: Final = 200
"""Rate of retries that a store asks for if many producers wait: a producer far back in the queue waits longer."""
UNMEASURED_RETRY_S: Final = 0.2
PARTS: Final = 8
"""A producer that waits should send at most this part of the limit at once."""

T = TypeVar("T")


class BacklogLoad(NamedTuple):
    """An amount of messages, with the bytes of their records."""

    messages: float
    bytes: float

    def plus(self, other: BacklogLoad) -> BacklogLoad:
        """Return the sum of this load and another load."""
        return BacklogLoad(self.messages + other.messages, self.bytes + other.bytes)

    def minus(self, other: BacklogLoad) -> BacklogLoad:
        """Return the difference of this load and another load."""
        return BacklogLoad(self.messages - other.messages, self.bytes - other.bytes)

    def within(self, other: BacklogLoad) -> bool:
        """Return True if neither the messages nor the bytes exceed the amounts of another load."""
        return self.messages <= other.messages and self.bytes <= other.bytes


NOTHING: Final = BacklogLoad(0, 0)


@dataclass(slots=True)
class _LoadCounter:
    """A counter of loads. Changed in place, because an append changes two counters."""

    messages: float = 0
    bytes: float = 0

    def add(self, load: BacklogLoad) -> None:
        self.messages += load.messages
        self.bytes += load.bytes

    def subtract(self, load: BacklogLoad) -> None:
        self.messages -= load.messages
        self.bytes -= load.bytes

    def load(self) -> BacklogLoad:
        return BacklogLoad(self.messages, self.bytes)


@dataclass(slots=True)
class _Place:
    """The place of a waiting producer: the load that it wants to append, the load for which room is reserved, and the
    time in seconds until which it keeps the place."""

    need: BacklogLoad
    until_s: float
    reserved: BacklogLoad | None = None


@dataclass(slots=True)
class _Gate:
    """One bounded topic: its limit, the counter of stored loads, and the producers that wait for room."""

    topic: str
    bound: BoundedTopic | None = None
    """None before the first measurement."""
    backlog: TopicBacklog | None = None
    limit: BacklogLoad = NOTHING
    ceiling: BacklogLoad = NOTHING
    stored: _LoadCounter = field(default_factory=_LoadCounter)
    taken: _LoadCounter = field(default_factory=_LoadCounter)
    """The stored load, and the load of appends that have been accepted and are not yet written."""
    places: dict[str, _Place] = field(default_factory=dict)
    refused: int = 0

    @property
    def waits(self) -> bool:
        """True if producers wait for room."""
        return self.bound is not None and self.bound.policy == BacklogPolicy.BLOCK

    def measured(self, bound: BoundedTopic, backlog: TopicBacklog, before: BacklogLoad, now_s: float) -> None:
        """Take a measurement. `before`: the counter just before the measurement, so that no append is left out."""
        self.bound, self.backlog = bound, backlog
        self.limit = BacklogLoad(bound.max_messages or math.inf, bound.max_bytes or math.inf)
        self.ceiling = before.plus(self.limit).minus(BacklogLoad(backlog.messages, backlog.bytes))
        if not self.waits:
            self.places.clear()
        self._reserve(now_s)

    def admit(self, producer: str, need: BacklogLoad, now_s: float) -> bool:
        """Count `need` as running if the topic has room for it now. Otherwise give the producer a place, if it
        waits."""
        place = self.places.get(producer)
        if place is None and not self.places:
            if not self._fits(need, self._room()):
                self._refuse(producer, need, now_s)
                return False
        else:
            self._refuse(producer, need, now_s)
            self._reserve(now_s)
            place = self.places.get(producer)
            if place is None or place.reserved is None:
                return False
            del self.places[producer]
            self.refused -= int(need.messages)
        self.taken.add(need)
        return True

    def admit_at_once(self, need: BacklogLoad) -> bool:
        """Admit `need` if no producer waits, and the topic has room for all of it. The usual case: it costs little."""
        ceiling, taken = self.ceiling, self.taken
        if (
            self.places
            or self.bound is None
            or taken.messages + need.messages > ceiling.messages
            or taken.bytes + need.bytes > ceiling.bytes
        ):
            return False
        taken.add(need)
        return True

    def written(self, need: BacklogLoad, *, stored: bool) -> None:
        """Note that an accepted append has ended. `stored`: True if its messages are in the log."""
        if stored:
            self.stored.add(need)
        else:
            self.taken.subtract(need)

    def error(self, producer: str, need: BacklogLoad) -> RaymqError:
        """Return the error for an append that was not admitted."""
        if self.bound is None or self.backlog is None:
            return SystemBusyError(
                f"the store has not measured the backlog of the bounded topic {self.topic!r} since it was opened or "
                "became the master; nothing was stored, send again",
                UNMEASURED_RETRY_S,
            )
        if self.limit.messages < math.inf:
            limit, most = f"{self.limit.messages:.0f} messages", self.limit.messages // PARTS
            if self.limit.bytes < math.inf:
                limit += f" or {self.limit.bytes:.0f} bytes"
        else:
            limit, most = f"{self.limit.bytes:.0f} bytes", math.inf
        if self.limit.bytes < math.inf:
            most = min(most, need.messages * self.limit.bytes / PARTS // max(need.bytes, 1))
        ahead = next((number for number, name in enumerate(self.places) if name == producer), len(self.places))
        retry_s = min(RETRY_MAX_S, RETRY_MIN_S + ahead / RETRIES_PER_S)
        return TopicFullError(self.topic, self.backlog.group, limit, self.waits, int(max(1, most)), retry_s)

    def _refuse(self, producer: str, need: BacklogLoad, now_s: float) -> None:
        self.refused += int(need.messages)
        place = self.places.get(producer)
        if place is not None:
            if place.reserved is not None and not need.within(place.reserved):
                place.reserved = None
            place.need, place.until_s = need, now_s + PLACE_S
        elif self.waits and len(self.places) < WAITING_PRODUCERS_MAX:
            self.places[producer] = _Place(need, now_s + PLACE_S)

    def _reserve(self, now_s: float) -> None:
        """Reserve room for the waiting producers in their order, up to the first that does not fit."""
        for name in [name for name, place in self.places.items() if place.until_s <= now_s]:
            del self.places[name]
        room = self._room()
        for place in self.places.values():
            if place.reserved is not None:
                room = room.minus(place.reserved)
        for place in self.places.values():
            if place.reserved is None:
                if not self._fits(place.need, room):
                    break
                place.reserved = place.need
                room = room.minus(place.need)

    def _room(self) -> BacklogLoad:
        return self.ceiling.minus(self.taken.load())

    def _fits(self, need: BacklogLoad, room: BacklogLoad) -> bool:
        """True if `need` fits into `room`. A need above the limit fits if the topic is empty."""
        return min(need.messages, self.limit.messages) <= room.messages and (
            min(need.bytes, self.limit.bytes) <= room.bytes
        )


class TopicBounds:
    """The bounded topics of one store. Thread-safe: appends and measurements come from different threads."""

    def __init__(
        self,
        expected: Callable[[], Collection[str]],
        is_stored: Callable[[EncodedBatch], bool],
        require_master: Callable[[], None] = lambda: None,
    ) -> None:
        """`expected`: returns the topics that have a bound according to the store's files; used until the broker has
        sent its bounds. `is_stored`: True if a batch is a repetition of a stored batch, which needs no room.
        `require_master`: raises NotMasterError if this replica is not the master; called before a refusal, so that a
        producer does not wait for room at a replica that will never have any."""
        self._expected, self._is_stored, self._require_master = expected, is_stored, require_master
        self._gates: dict[str, _Gate] = {}
        self._epoch = -1
        self._lock = threading.Lock()

    def append(self, batches: Sequence[EncodedBatch], epoch: int, now_s: float, store: Callable[[], T]) -> T:
        """Call `store`, which writes the batches, if all bounded topics among the batches have room. `epoch`: the epoch
        in which this replica is the master; a new epoch needs a new measurement. `now_s`: the monotonic time.

        Raises TopicFullError, SystemBusyError before the first measurement, and NotMasterError if the topic is full and
        another replica is the master. Nothing was written then.
        """
        if epoch != self._epoch:
            self._begin(epoch)
        gates = self._gates
        if not gates:
            return store()
        if len(batches) == 1 and (gate := gates.get(batches[0].topic)) is not None:
            [batch] = batches
            need = BacklogLoad(_messages(batch, gate.bound), len(batch.records))
            with self._lock:
                is_admitted = gate.admit_at_once(need)
            if is_admitted:
                return self._store([(gate, need)], store)
        needs = self._needs(batches)
        if not needs:
            return store()
        with self._lock:
            admitted = self._admit(needs, now_s)
        if isinstance(admitted, RaymqError):
            self._require_master()
            if all(batch.producer is not None and self._is_stored(batch) for batch in batches):
                return store()
            raise admitted
        return self._store(admitted, store)

    def _store(self, admitted: Sequence[tuple[_Gate, BacklogLoad]], store: Callable[[], T]) -> T:
        """Write batches that were admitted, and count what was stored."""
        stored = False
        try:
            result = store()
            stored = True
            return result
        finally:
            with self._lock:
                for gate, need in admitted:
                    gate.written(need, stored=stored)

    def counters(self, epoch: int) -> dict[str, BacklogLoad]:
        """Return the counters of the bounded topics. Call this before the backlogs are measured, for `change`."""
        if epoch != self._epoch:
            self._begin(epoch)
        with self._lock:
            return {topic: gate.stored.load() for topic, gate in self._gates.items()}

    def change(
        self,
        bounds: Iterable[BoundedTopic],
        backlogs: Iterable[TopicBacklog],
        counters: dict[str, BacklogLoad],
        epoch: int,
        now_s: float,
    ) -> list[TopicBacklog]:
        """Take the bounds of all bounded topics with their measured backlogs. A topic that is not among them has no
        limit. `counters`: from `counters`, before the measurement. A measurement of an older epoch changes nothing.

        Returns the backlogs, with the numbers of refused messages and of waiting producers.
        """
        measured = list(zip(bounds, backlogs, strict=True))
        shown = []
        with self._lock:
            if epoch != self._epoch:
                return [backlog for _, backlog in measured]
            gates: dict[str, _Gate] = {}
            for bound, backlog in measured:
                gate = self._gates.get(bound.topic)
                if bound.policy != BacklogPolicy.DROP:
                    gate = gates[bound.topic] = gate or _Gate(bound.topic)
                    gate.measured(bound, backlog, counters.get(bound.topic, gate.stored.load()), now_s)
                    shown.append(backlog._replace(refused=gate.refused, waiting=len(gate.places)))
                else:
                    shown.append(backlog)
            # Replace the mapping as a whole, because appends look topics up without the lock.
            self._gates = gates
        return shown

    def _begin(self, epoch: int) -> None:
        """Begin an epoch: every topic that may be bounded needs a new measurement."""
        expected = self._expected()
        with self._lock:
            if epoch != self._epoch:
                self._gates = {topic: _Gate(topic) for topic in {*expected, *self._gates}}
                self._epoch = epoch

    def _needs(self, batches: Iterable[EncodedBatch]) -> dict[str, tuple[str, BacklogLoad]]:
        """Return, for each bounded topic among the batches, the producer and the load that it appends. A delayed
        message, or a half message, counts for the topic to which it will be delivered."""
        gates = self._gates  # a measurement may replace the mapping in another thread
        needs: dict[str, tuple[str, BacklogLoad]] = {}
        for batch in batches:
            producer = "" if batch.producer is None else batch.producer.producer_id
            if names_real_topic(batch.topic):
                size = len(batch.records) / max(len(batch), 1)
                loads = [(topic, BacklogLoad(1, size)) for topic in real_topics(batch) if topic in gates]
            elif batch.topic in gates:
                loads = [(batch.topic, BacklogLoad(_messages(batch, gates[batch.topic].bound), len(batch.records)))]
            else:
                continue
            for topic, load in loads:
                needs[topic] = producer, load.plus(needs[topic][1] if topic in needs else NOTHING)
        return needs

    def _admit(
        self, needs: dict[str, tuple[str, BacklogLoad]], now_s: float
    ) -> list[tuple[_Gate, BacklogLoad]] | RaymqError:
        """Admit the loads of one request, all or none."""
        admitted: list[tuple[_Gate, BacklogLoad]] = []
        for topic, (producer, need) in needs.items():
            gate = self._gates.get(topic)
            if gate is None:
                continue
            if gate.bound is None or not gate.admit(producer, need, now_s):
                for other, load in admitted:
                    other.written(load, stored=False)
                return gate.error(producer, need)
            admitted.append((gate, need))
        return admitted


def _messages(batch: EncodedBatch, bound: BoundedTopic | None) -> int:
    if bound is None or not bound.inner or not len(batch):
        return len(batch)
    return int(dispatch_view(batch.records, 0).properties.get(PROPERTY_INNER_NUM, "1"))
