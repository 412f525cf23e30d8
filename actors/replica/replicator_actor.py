"""Replicator: the actor that carries the log from a broker group's master to one slave replica.

This module decides where a Replicator starts in the log, and how it continues after a failed call;
actors.replica.log_carrier transfers chunks between lanes (direct socket connections).

    slave.following ─▶ master, epoch ─▶ master.history ─▶ slave.align ─▶ mend damage (actors.replica.log_mender)
                                                └─▶ read the log (from) ══ chunk ══▶ append it at the slave ─▶ from, …

Chunks are sent over two lanes, one to each of the two storage actors. If a lane cannot be opened or breaks, the
Replicator pauses. Then it asks the slave again for its current master, and both storage actors for their current
addresses. While a hanging master does not answer, the Replicator checks at intervals whether the slave follows another
master.

No state survives a crash, and none needs to: the slave has its own end offset. Every call of a Replicator is safe to
repeat: a chunk that does not continue the slave's log is rejected.

A Replicator may wait for Storage. No actor waits for a Replicator.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from functools import partial
from typing import Any, Final

import ray

from actors.actor_class import actor_class
from actors.core.replica.orders import Following
from actors.options import PERSISTENT
from actors.replica.log_carrier import LATE_S, REPLICATE_CALL_TIMEOUT_S, REPLICATE_LONG_POLL_S, LogCarrier
from actors.replica.log_mender import MEND_INTERVAL_S, mend_both
from actors.threads import take_turns_quickly
from raymq.common.errors import RaymqError, RecordsDamagedError, RequestTimeoutError
from raymq.common.names import StorageName
from raymq.common.retry import Backoff
from raymq.remoting.actor_ref import ActorRef, resolve
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane_pool import DESCRIBE_TIMEOUT_S, LANE_NOT_OPENED, lane_error
from raymq.remoting.storage_client import StorageDescription

HISTORY_TIMEOUT_S: Final = 3.0

logger = logging.getLogger(__name__)


class Replicator:
    """The actor that copies the log of a broker group's master to one slave, in a loop. `flow_bytes_s`: the maximum
    number of bytes per second; None for no limit."""

    def __init__(self, slave: StorageName, flow_bytes_s: int | None = None) -> None:
        take_turns_quickly()
        self._name = slave
        self._slave = ActorRef(str(slave))
        self._flow_bytes_s = flow_bytes_s
        self._node_id = ray.get_runtime_context().get_node_id()
        self._stopping = threading.Event()
        self._copied = 0
        self._mended = 0
        self._mending = threading.Lock()
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="replicate", daemon=True)
        self._thread.start()
        threading.Thread(target=self._mend_again, name="mend", daemon=True).start()

    def status(self) -> dict[str, Any]:
        """Return the numbers of bytes copied and repaired since the start of this actor, and the last failure."""
        return {
            "slave": str(self._name),
            "copied_bytes": self._copied,
            "mended_bytes": self._mended,
            "error": self._failure,
        }

    def close(self) -> None:
        """Stop copying the log, at the latest after the current call."""
        self._stopping.set()
        self._thread.join(REPLICATE_CALL_TIMEOUT_S)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                following: Following | None = self._slave.call(
                    "following", REPLICATE_LONG_POLL_S, timeout_s=REPLICATE_CALL_TIMEOUT_S
                )
                if following is not None:
                    self._copy(following)
                backoff.reset()
            except RaymqError as error:
                # The copy failed because a replica changed its role or is unreachable. After a pause, the loop asks the
                # slave again for its current master.
                self._failure = str(error)
                logger.info("replicator %s pauses the copy of the log: %s", self._name, error)
                self._stopping.wait(backoff.next())

    def _copy(self, following: Following) -> None:
        """Carry chunks of the log from the master to the slave until a call fails, for example after a change
        of roles."""
        master = ActorRef(str(StorageName(self._name.broker_name, following.master)))
        position = following.position
        if position is None:
            history = master.call("history", following.epoch, timeout_s=HISTORY_TIMEOUT_S)
            position = self._slave.call("align", following.epoch, history, timeout_s=REPLICATE_CALL_TIMEOUT_S * 6)
        self._mend(following)
        # A master that hangs may never return its address. So keep checking the slave while waiting for the address.
        described = master.start("describe")
        if not self._await_answer(described, following, LATE_S):
            return
        there = resolve(described, f"{master.name}.describe", DESCRIBE_TIMEOUT_S)
        here = self._slave.call("describe", timeout_s=DESCRIBE_TIMEOUT_S)
        with closing(self._open_lane(there)) as from_master, closing(self._open_lane(here)) as to_slave:
            LogCarrier(
                from_master,
                to_slave,
                following,
                self._name.replica,
                position,
                is_followed=partial(self._is_followed, following),
                on_copied=self._note_copied,
                on_refused=partial(self._report, master, following),
                stopping=self._stopping,
                flow_bytes_s=self._flow_bytes_s,
            ).run()

    def _mend(self, following: Following) -> None:
        """Repair the damaged ranges of the master's and of the slave's log, each with the bytes of the other
        log."""
        master = ActorRef(str(StorageName(self._name.broker_name, following.master)))
        with self._mending:
            self._mended += mend_both(master, self._slave, following, self._name.replica)

    def _mend_again(self) -> None:
        """Repair log damage that appears while chunks are being copied. Runs at intervals until the actor
        stops."""
        while not self._stopping.wait(MEND_INTERVAL_S):
            try:
                now: Following | None = self._slave.call("following", 0.0, timeout_s=REPLICATE_CALL_TIMEOUT_S)
                if now is not None and now.position is not None:
                    self._mend(now)
            except RaymqError as error:
                logger.info("replicator %s cannot look for damaged log ranges: %s", self._name, error)

    def _open_lane(self, description: StorageDescription) -> Lane:
        """Open a lane (direct socket connection) to a storage actor. Raises ServiceNotAvailableError if the lane cannot
        be opened."""
        try:
            return Lane(description.lane, remote=description.node_id != self._node_id)
        except LANE_NOT_OPENED as error:
            raise lane_error(f"replication to {self._name} waits", description.name, description.lane, error) from error

    def _note_copied(self, copied_bytes: int) -> None:
        self._copied += copied_bytes
        self._failure = ""

    def _report(self, master: ActorRef, following: Following, error: RecordsDamagedError) -> None:
        """Report to the master that the slave refused records of a chunk. The master checks its log, and sends nothing
        of a damaged range until intact bytes of another replica have replaced it."""
        logger.error("replicator %s: replica %d sent damaged records: %s", self._name, following.master, error)
        master.call(
            "report_log", following.epoch, error.physical_offset, error.size, timeout_s=REPLICATE_CALL_TIMEOUT_S
        )

    def _is_followed(self, following: Following) -> bool:
        """Return True if the slave still follows the master and epoch in `following`."""
        now: Following | None = self._slave.call("following", 0.0, timeout_s=REPLICATE_CALL_TIMEOUT_S)
        return now is not None and (now.master, now.epoch) == (following.master, following.epoch)

    def _await_answer(self, answer: Any, following: Following, wait_s: float) -> bool:
        """Wait for a master's answer or error. If the answer takes longer than `wait_s`, check which master the slave
        follows.

        Returns False if the slave now follows another master. Raises RequestTimeoutError if the master hangs.
        """
        longest_s = REPLICATE_LONG_POLL_S + REPLICATE_CALL_TIMEOUT_S
        deadline_s = time.monotonic() + longest_s
        while not ray.wait([answer], timeout=wait_s, fetch_local=False)[0]:
            wait_s = LATE_S
            if not self._is_followed(following):
                return False
            if self._stopping.is_set() or time.monotonic() >= deadline_s:
                raise RequestTimeoutError(f"getting the lane's address from replica {following.master}", longest_s)
        return True


REPLICATOR_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 4}
ReplicatorActor = ray.remote(**REPLICATOR_OPTIONS)(actor_class(Replicator))
