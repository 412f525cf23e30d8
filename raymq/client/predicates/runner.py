"""PredicateRunner is the actor that runs one predicate of one consumer group beside one storage actor.

    consumer ── fetch ──▶ PredicateRunner ── which messages are new ──▶ Storage      on one node
             ◀─ matches ─       │ their places  ▲ which match
                                ▼               │
                          the predicate's process, which maps the log (raymq.client.predicates.child)

The first consumer that needs the actor creates it, in the predicate's `runtime_env`. Each fetch renews the actor's
lease: the actor ends itself RUNNER_IDLE_S after the last fetch. All its state is lost when it ends, and a fetch is safe
to repeat. The user's function runs in a child process, which can be ended during a call and cannot harm the actor. If
access control is on, each user has a separate runner, which serves only that user's signed calls
(raymq.remoting.access.stand_in).

Blocking calls: the runner may wait for Storage. Consumers, and Pull actors for their consumers, wait for the runner.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import ray

from raymq.client.predicates.evaluation import Evaluated
from raymq.client.predicates.predicate import Predicate
from raymq.client.predicates.process import PredicateProcess
from raymq.client.predicates.scan import PredicateScan
from raymq.common import identity
from raymq.common.identity import Identity
from raymq.common.protocol.consume_result import StoreLog
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.memory_records import LocatedRecords
from raymq.remoting.access.stand_in import owned_actor
from raymq.remoting.storage_client import StorageClient

RUNNER_IDLE_S: Final = 30.0
IDLE_CHECK_S: Final = 1.0
FETCHES_MAX: Final = 32
"""Maximum number of concurrent fetches at a PredicateRunner. Further fetches wait until a fetch ends."""
FIND_TIMEOUT_S: Final = 5.0


class PredicateRunner:
    """Actor that runs one PredicateScan. `storage` names the storage actor to read. The actor acts as `user` if a user
    is given."""

    def __init__(
        self, storage: str, predicate: Predicate, idle_s: float = RUNNER_IDLE_S, user: Identity | None = None
    ) -> None:
        if user is not None:
            identity.take(user)
        self._client = StorageClient(storage, ray.get_runtime_context().get_node_id())
        self._predicate = predicate
        self._process = PredicateProcess(predicate)
        self._lock = threading.Lock()
        """Lock that guards `_scan`, `_fetches` and `_fetched_s`."""
        self._scan: tuple[str, PredicateScan] | None = None
        """The PredicateScan that reads the storage actor's messages, with the name of the actor's broker group; None
        before the first fetch."""
        self._fetches = 0
        self._fetched_s = time.monotonic()
        self._idle_s = idle_s
        self._me = ray.get_runtime_context().current_actor
        threading.Thread(target=self._end_when_idle, name="lease", daemon=True).start()

    def fetch(self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float) -> list[FetchResult]:
        """Read the messages that match the predicate from several queues (see PredicateScan.fetch). Raises the errors
        of the storage actor."""
        with self._lock:
            self._fetches += 1
        try:
            return self._make_scan().fetch(requests, max_bytes, wait_s, FIND_TIMEOUT_S)
        finally:
            with self._lock:
                self._fetches -= 1
                self._fetched_s = time.monotonic()

    def pids(self) -> tuple[int, int | None]:
        """Return the process ids of this actor and of the predicate's process, for tests and debugging. The second is
        None while the predicate's process does not run."""
        return os.getpid(), self._process.pid

    def _make_scan(self) -> PredicateScan:
        broker_name = self._client.describe().broker_name
        with self._lock:
            if self._scan is None or self._scan[0] != broker_name:
                scan = PredicateScan(
                    self._client,
                    partial(self._evaluate, broker_name),
                    name=self._predicate.text,
                    broker_name=broker_name,
                    in_place=self._client.reader() is not None,
                )
                self._scan = (broker_name, scan)
            return self._scan[1]

    def _evaluate(self, broker_name: str, records: LocatedRecords, until_s: float, log: StoreLog | None) -> Evaluated:
        return self._process.evaluate(records, broker_name, until_s, log)

    def _end_when_idle(self) -> None:
        while True:
            time.sleep(IDLE_CHECK_S)
            with self._lock:
                idle = not self._fetches and time.monotonic() - self._fetched_s > self._idle_s
            if idle:
                self._process.close()
                ray.kill(self._me)  # let the actor kill itself, because Ray reports no actor death for an intended kill
                return


RUNNER_OPTIONS: Final[dict[str, Any]] = {
    # Ray must not restart a runner actor that has ended. Instead the next fetch creates another runner, on the node on
    # which the storage actor runs at that time.
    "max_restarts": 0,
    "max_task_retries": 0,
    "num_cpus": 0,
    "lifetime": "detached",  # the runner serves all members of the group, so it must outlive the member that created it
    "max_concurrency": FETCHES_MAX,
}
PredicateRunnerActor = ray.remote(**RUNNER_OPTIONS)(owned_actor(PredicateRunner))
