"""Replicator: carries the log from a broker group's master to one slave replica.

Where a Replicator begins, and what happens after a failed call, belongs here; the transfer of chunks between lanes in
actors.replica.log_carrier.

    slave.following ─▶ master, epoch ─▶ master.history ─▶ slave.align ─▶ mend damage (actors.replica.log_mender)
                                                └─▶ read the log (from) ══ chunk ══▶ append it at the slave ─▶ from, …

Chunks go over a lane to each of the two storage actors. If a lane cannot be opened, chunks go by actor calls for
CALLS_S, with the same meaning. A chunk is then passed by object reference, so that this actor does not hold its bytes,
and each request acknowledges what the slave has on its disk. The reference is sent to the slave only once the chunk
exists: Ray keeps the order of calls, and the next call would wait for a chunk that never comes. While a hanging master
does not answer, the Replicator checks at intervals whether the slave follows another master.

What survives its death: nothing, and nothing has to; the slave has its own end offset. Everything it calls is safe to
repeat: a chunk that does not continue the slave's log is refused.

May wait for: Storage. Nobody waits for a Replicator.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import ray

from actors.actor_class import actor_class
from actors.core.replica.orders import Copied, Following
from actors.options import PERSISTENT
from actors.replica.log_carrier import LATE_S, REPLICATE_CALL_TIMEOUT_S, REPLICATE_LONG_POLL_S, LogCarrier
from actors.replica.log_mender import MEND_INTERVAL_S, mend_both
from actors.threads import take_turns_quickly
from raymq.common.errors import RaymqError, RequestTimeoutError
from raymq.common.names import StorageName
from raymq.common.retry import Backoff
from raymq.remoting.actor_ref import ActorRef, resolve
from raymq.remoting.lane.client import Lane
from raymq.remoting.lane_pool import DESCRIBE_TIMEOUT_S, LANE_NOT_OPENED
from raymq.remoting.storage_client import StorageDescription
from storage.replication.log_chunks import CHUNK_MAX_BYTES

HISTORY_TIMEOUT_S: Final = 3.0
CALLS_S: Final = 10.0
"""How long chunks go by actor calls before lanes are tried again."""

logger = logging.getLogger(__name__)


class Replicator:
    """The loop that serves one slave. `flow_bytes_s`: the most bytes per second, None for no limit."""

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
        """Return the copied and the mended bytes since the start, and the last failure."""
        return {
            "slave": str(self._name),
            "copied_bytes": self._copied,
            "mended_bytes": self._mended,
            "error": self._failure,
        }

    def close(self) -> None:
        """End the loop, at the latest after the current call."""
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
                # A role has changed, or a replica is absent: ask the slave again for its master.
                self._failure = str(error)
                logger.info("%s: %s", self._name, error)
                self._stopping.wait(backoff.next())

    def _copy(self, following: Following) -> None:
        """Carry chunks until a call fails, as after a change of roles."""
        master = ActorRef(str(StorageName(self._name.broker_name, following.master)))
        position = following.position
        if position is None:
            history = master.call("history", following.epoch, timeout_s=HISTORY_TIMEOUT_S)
            position = self._slave.call("align", following.epoch, history, timeout_s=REPLICATE_CALL_TIMEOUT_S * 6)
        self._mend(following)
        # A hanging master may not return its address, either.
        described = master.start("describe")
        if not self._await_answer(described, following, LATE_S):
            return
        there = resolve(described, f"{master.name}.describe", DESCRIBE_TIMEOUT_S)
        here = self._slave.call("describe", timeout_s=DESCRIBE_TIMEOUT_S)
        with ExitStack() as lanes:
            try:
                ends = self._open_lane(there, lanes), self._open_lane(here, lanes)
            except LANE_NOT_OPENED as error:
                if isinstance(error, RaymqError):
                    raise  # RequestTimeoutError is an OSError by way of TimeoutError
                logger.info("%s copies by actor calls, because a lane cannot be opened: %r", self._name, error)
            else:
                carrier = LogCarrier(
                    *ends,
                    following,
                    self._name.replica,
                    position,
                    is_followed=partial(self._is_followed, following),
                    on_copied=self._note_copied,
                    stopping=self._stopping,
                    flow_bytes_s=self._flow_bytes_s,
                )
                carrier.run()
                return
        self._copy_by_calls(master, following, position)

    def _mend(self, following: Following) -> None:
        """Mend the damaged ranges of either log with the bytes of the other log."""
        master = ActorRef(str(StorageName(self._name.broker_name, following.master)))
        with self._mending:
            self._mended += mend_both(master, self._slave, following, self._name.replica)

    def _mend_again(self) -> None:
        """Mend damage that is found while chunks are copied."""
        while not self._stopping.wait(MEND_INTERVAL_S):
            try:
                now: Following | None = self._slave.call("following", 0.0, timeout_s=REPLICATE_CALL_TIMEOUT_S)
                if now is not None and now.position is not None:
                    self._mend(now)
            except RaymqError as error:
                logger.info("%s was not looked through for damage: %s", self._name, error)

    def _open_lane(self, description: StorageDescription, lanes: ExitStack) -> Lane:
        """Open a lane to a storage actor, which `lanes` closes. Raises as LANE_NOT_OPENED."""
        lane = Lane(description.lane, remote=description.node_id != self._node_id)
        lanes.callback(lane.close)
        return lane

    def _note_copied(self, copied_bytes: int) -> None:
        self._copied += copied_bytes
        self._failure = ""

    def _is_followed(self, following: Following) -> bool:
        """True if the slave still follows this master in this epoch."""
        now: Following | None = self._slave.call("following", 0.0, timeout_s=REPLICATE_CALL_TIMEOUT_S)
        return now is not None and (now.master, now.epoch) == (following.master, following.epoch)

    def _copy_by_calls(self, master: ActorRef, following: Following, position: int) -> None:
        """Copy as `_copy` does, but by actor calls, for a while."""
        copied = Copied(position, position, 0)
        until_s = time.monotonic() + CALLS_S
        while not self._stopping.is_set() and time.monotonic() < until_s:
            started_s = time.monotonic()
            request = following.request(self._name.replica, copied.next_offset, copied.acked_offset)
            chunk = master.start("read_log", request, CHUNK_MAX_BYTES, REPLICATE_LONG_POLL_S)
            if not self._await_answer(chunk, following, REPLICATE_LONG_POLL_S + LATE_S):
                return
            appended = self._slave.start("append_log", following.epoch, chunk)
            copied = resolve(appended, f"{self._name}.append_log", REPLICATE_CALL_TIMEOUT_S)
            self._note_copied(copied.copied_bytes)
            if self._flow_bytes_s:
                took_s = time.monotonic() - started_s
                self._stopping.wait(max(copied.copied_bytes / self._flow_bytes_s - took_s, 0.0))

    def _await_answer(self, answer: Any, following: Following, wait_s: float) -> bool:
        """Wait for a master's answer, or its error; the answer is late after `wait_s`.

        Returns False if the slave follows another master now.
        """
        deadline_s = time.monotonic() + REPLICATE_LONG_POLL_S + REPLICATE_CALL_TIMEOUT_S
        while not ray.wait([answer], timeout=wait_s, fetch_local=False)[0]:
            wait_s = LATE_S
            if not self._is_followed(following):
                return False
            if self._stopping.is_set() or time.monotonic() >= deadline_s:
                raise RequestTimeoutError(
                    f"replica {following.master}, to read its log,", REPLICATE_LONG_POLL_S + REPLICATE_CALL_TIMEOUT_S
                )
        return True


REPLICATOR_OPTIONS: Final = {**PERSISTENT, "max_concurrency": 4}
ReplicatorActor = ray.remote(**REPLICATOR_OPTIONS)(actor_class(Replicator))
