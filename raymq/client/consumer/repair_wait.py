"""RepairWait reports the damaged records that one reader meets, and says how long to wait for their repair.

    a record fails its checks ─▶ report_damage at the storage actor, in one thread, several records per call
        INTACT    the record was repaired: read it again, at the same offset
        PENDING   ask again, until READ_REPAIR_WAIT_S after the first report
        LOST      no replica in contact has the intact record: the reader delivers an error in its place

After a wait without success, the reader waits for no further record of the queue for REPAIR_PAUSE_S. So damage delays a
queue by a quarter of the time at most. The records are reported nevertheless.

A consumer goes on with other queues: `meet` reports in a thread. A scan or an administration call blocks in `wait`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from raymq.common.errors import BodyUnreadableError, RaymqError
from raymq.common.message import MessageQueue
from raymq.common.parallel import start_daemon
from raymq.common.protocol.store import REPORT_MAX, QueuePosition, RepairState
from raymq.records.format.crc import SEAL_WRONG
from raymq.records.format.decode import CRC_WRONG
from raymq.remoting.master_locator import RouteSource
from raymq.remoting.storage_client import StorageClient
from raymq.remoting.storage_clients import StorageClients, call_master

READ_REPAIR_WAIT_S: Final = 15.0
"""Maximum time in seconds that a reader waits for the repair of a damaged record. Replicators look for damage every
5 s."""
REPAIR_PAUSE_S: Final = 45.0
"""Time in seconds after a wait without success in which the reader waits for no other record of the same queue."""
WAITS_MAX: Final = 10_000
"""Maximum number of damaged records that a reader keeps in mind. It does not wait for further ones."""
ASK_FIRST_S: Final = 0.05
"""Time in seconds between the first two reports of a record. The time doubles with each report."""
ASK_AGAIN_S: Final = 0.5
REPORT_TIMEOUT_S: Final = 3.0
REREADS_MAX: Final = 5
"""Maximum number of times that one step of an administration call reads again after repairs."""
ADMIN_REPAIR_WAIT_S: Final = 6.0
"""Maximum time in seconds that one step of an administration call waits for repairs. A person waits for the answer."""
CHECKSUM_WRONG: Final = frozenset({CRC_WRONG, SEAL_WRONG})
"""The reasons why a message cannot be read although its record's header is intact: a checksum is wrong."""

logger = logging.getLogger(__name__)

T = TypeVar("T")

Report = Callable[[MessageQueue, Sequence[QueuePosition]], list[RepairState]]
"""Function that reports damaged records of one queue to the storage actor from which the queue is read."""


def is_damage(error: BodyUnreadableError) -> bool:
    """Return True if a message cannot be read because its stored bytes are damaged. A body that its producer compressed
    wrongly is no damage, and no replica has another one."""
    return error.record_damaged or error.reason in CHECKSUM_WRONG


def report_to_master(
    routes: RouteSource, storages: StorageClients, queue: MessageQueue, offsets: Sequence[int]
) -> list[RepairState]:
    """Report the damaged records at these offsets of a queue, at most REPORT_MAX, to the queue's master. Returns what
    the master can do for each. Raises RaymqError if the master does not answer in time."""
    positions = [QueuePosition(queue.topic, queue.queue_id, offset) for offset in offsets]
    return call_master(
        routes, storages, queue, REPORT_TIMEOUT_S, lambda storage, left_s: storage.report_damage(positions, left_s)
    )


def wait_at_masters(routes: RouteSource, storages: StorageClients) -> RepairWait:
    """Return the RepairWait of a reader that reads each queue from its master, and that looks again by itself."""

    def report(queue: MessageQueue, positions: Sequence[QueuePosition]) -> list[RepairState]:
        return report_to_master(routes, storages, queue, [position.queue_offset for position in positions])

    return RepairWait(report, lambda queue: None)


def wait_at_stores(storage_of: Callable[[str], StorageClient]) -> RepairWait:
    """Return the RepairWait of a reader of queues that have no route, and that looks again by itself.
    `storage_of(broker_name)` returns the master of a broker group."""

    def report(queue: MessageQueue, positions: Sequence[QueuePosition]) -> list[RepairState]:
        return storage_of(queue.broker_name).report_damage(positions, REPORT_TIMEOUT_S)

    return RepairWait(report, lambda queue: None)


def read_repaired(
    read: Callable[[], T],
    damage_of: Callable[[T], Mapping[MessageQueue, Sequence[int]]],
    repairs: RepairWait,
    deadline_s: float = math.inf,
) -> T:
    """Return the result of `read`. If it has damaged records, wait for their repair, and read again.

    `damage_of` returns the offsets of a result's damaged records, by queue. Waits at most ADMIN_REPAIR_WAIT_S, not
    longer than `deadline_s` (time.monotonic), and reads again at most REREADS_MAX times.
    """
    deadline_s = min(deadline_s, time.monotonic() + ADMIN_REPAIR_WAIT_S)
    result = read()
    for _ in range(REREADS_MAX):
        waits = [
            repairs.wait(queue, offsets, max(deadline_s - time.monotonic(), 0.0))
            for queue, offsets in damage_of(result).items()
        ]
        if not any(waits):
            break
        result = read()
    return result


@dataclass(slots=True)
class _Wait:
    """The wait for the repair of one record. `state` is the storage actor's last answer."""

    deadline_s: float
    state: RepairState = RepairState.PENDING


class RepairWait:
    """The damaged records that one reader has met. Thread-safe.

    `report` makes a call to a storage actor. `released(queue)` is called when the consumer should read a queue again,
    because a record that it waited for was repaired or is given up. After `meet`, one thread calls both. It runs only
    while records wait. `wait` calls `report` in the caller's thread.
    """

    def __init__(
        self,
        report: Report,
        released: Callable[[MessageQueue], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._released, self._clock_s = report, released, clock_s
        self._changed = threading.Condition()
        """Condition that guards all attributes below."""
        self._waits: dict[tuple[MessageQueue, int], _Wait] = {}
        self._gave_up_s: dict[MessageQueue, float] = {}
        """For each queue, the time at which a wait ended without success."""
        self._thread: threading.Thread | None = None
        self._closed = False

    def meet(self, queue: MessageQueue, offsets: Iterable[int]) -> int | None:
        """Report the records at these offsets of a queue, which fail their checks. Does not block.

        Returns the first of these offsets for which the consumer should wait: it delivers the messages before this
        offset, and reads the queue again after `released`. Returns None if all of them should be delivered as they are.
        """
        with self._changed:
            first = self._note(queue, offsets)
            if self._thread is None and any(one.state is RepairState.PENDING for one in self._waits.values()):
                self._thread = start_daemon(self._run, name="report-damage")
            return None if self._thread is None else first

    def wait(self, queue: MessageQueue, offsets: Iterable[int], timeout_s: float = READ_REPAIR_WAIT_S) -> bool:
        """Report the records at these offsets of a queue, which fail their checks, and wait for their repair, at most
        `timeout_s`. Negative offsets are unknown, and ignored. Blocks.

        Returns True if a record was repaired, so that the caller reads again. Returns False if all of them should be
        delivered as they are.
        """
        chosen = sorted({offset for offset in offsets if offset >= 0})[:REPORT_MAX]
        if not chosen:
            return False
        end_s, pause_s = self._clock_s() + timeout_s, ASK_FIRST_S
        with self._changed:
            known = {offset: self._waits[queue, offset] for offset in chosen if (queue, offset) in self._waits}
            waits = self._note(queue, chosen) is not None
            # A record whose wait has ended is not read again, even if the store finds it intact.
            over = {offset for offset, wait in known.items() if self._clock_s() >= wait.deadline_s}
            if known and waits:  # the caller has read these records again, and they are still damaged
                self._changed.wait_for(lambda: self._closed, min(ASK_FIRST_S, timeout_s))
        while True:
            self._ask(queue, chosen)
            with self._changed:
                states = {self._state_of(queue, offset) for offset in chosen if offset not in over}
                left_s = end_s - self._clock_s()
                if not waits or self._closed or RepairState.PENDING not in states or left_s <= 0:
                    return RepairState.INTACT in states and not self._closed
                self._changed.wait_for(lambda: self._closed, min(pause_s, left_s))
            pause_s = min(2 * pause_s, ASK_AGAIN_S)

    def _state_of(self, queue: MessageQueue, offset: int) -> RepairState:
        wait = self._waits.get((queue, offset))
        return RepairState.LOST if wait is None else wait.state

    def _note(self, queue: MessageQueue, offsets: Iterable[int]) -> int | None:
        """Remember that the records at these offsets of a queue fail their checks. Called with the lock held. Returns
        the first offset for which the reader should wait, or None."""
        first: int | None = None
        now_s = self._clock_s()
        self._forget_old(now_s)
        for offset in sorted(offsets):
            wait = self._waits.get((queue, offset))
            if wait is None:
                if len(self._waits) >= WAITS_MAX or self._closed:
                    continue
                may_wait = now_s >= self._gave_up_s.get(queue, -REPAIR_PAUSE_S + now_s) + REPAIR_PAUSE_S
                wait = self._waits[queue, offset] = _Wait(now_s + (READ_REPAIR_WAIT_S if may_wait else 0.0))
            elif wait.state is RepairState.INTACT:
                # The record was repaired, and the reader has read it before, or it is damaged again.
                wait.state = RepairState.PENDING
            if first is None and wait.state is RepairState.PENDING and now_s < wait.deadline_s:
                first = offset
        return first

    def is_waiting(self, queue: MessageQueue, offset: int) -> bool:
        """Return True if the record at an offset of a queue is not yet repaired or given up."""
        with self._changed:
            wait = self._waits.get((queue, offset))
            return wait is not None and wait.state is RepairState.PENDING and not self._closed

    def close(self) -> None:
        """Stop reporting. A running report ends within its timeout. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _forget_old(self, now_s: float) -> None:
        """Forget waits that have ended long ago."""
        old = [key for key, wait in self._waits.items() if now_s > wait.deadline_s + REPAIR_PAUSE_S]
        for key in old:
            del self._waits[key]
        for queue in [queue for queue, at_s in self._gave_up_s.items() if now_s > at_s + REPAIR_PAUSE_S]:
            del self._gave_up_s[queue]

    def _run(self) -> None:
        pause_s = ASK_FIRST_S
        while True:
            with self._changed:
                pending = [key for key, wait in self._waits.items() if wait.state is RepairState.PENDING]
                if self._closed or not pending:
                    self._thread = None
                    return
            by_queue: dict[MessageQueue, list[int]] = {}
            for queue, offset in pending:
                by_queue.setdefault(queue, []).append(offset)
            for queue, offsets in by_queue.items():
                if self._ask(queue, offsets[:REPORT_MAX]):
                    self._released(queue)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause_s)
            pause_s = min(2 * pause_s, ASK_AGAIN_S)

    def _ask(self, queue: MessageQueue, offsets: Sequence[int]) -> bool:
        """Report records of a queue. Returns True if the wait for at least one of them has ended."""
        positions = [QueuePosition(queue.topic, queue.queue_id, offset) for offset in offsets]
        try:
            states = self._report(queue, positions)
        except RaymqError as error:
            logger.info("cannot report damaged records of queue %s now: %s", queue, error)
            states = [RepairState.PENDING] * len(positions)
        except Exception:  # catch bugs: if this thread ended, the consumer would wait for ever
            logger.exception("cannot report damaged records of queue %s", queue)
            states = [RepairState.LOST] * len(positions)
        ended = False
        with self._changed:
            now_s = self._clock_s()
            for offset, state in zip(offsets, states, strict=True):
                wait = self._waits.get((queue, offset))
                if wait is None:
                    continue
                wait.state = state
                if state is RepairState.PENDING and now_s >= wait.deadline_s:
                    wait.state = RepairState.LOST
                    self._gave_up_s.setdefault(queue, now_s)
                ended = ended or wait.state is not RepairState.PENDING
        return ended
