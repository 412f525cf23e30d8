"""PredicateStorage is a store that a consumer reads through its predicate: a fetch returns only the matching messages.

On the storage actor's node, a pull consumer calls the predicate function in its own process. For all other consumers, a
PredicateRunner on that node calls the function.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymq.client.predicates.evaluation import Evaluated, FunctionHere
from raymq.client.predicates.predicate import Predicate
from raymq.client.predicates.process import CHILD_START_TIMEOUT_S
from raymq.client.predicates.runner import PredicateRunnerActor
from raymq.client.predicates.scan import SCAN_S, FetchFailed, PredicateScan
from raymq.common import identity
from raymq.common.errors import PredicateFailedError
from raymq.common.message import MessageQueue, PullStatus
from raymq.common.names import INSTANCES, PredicateName
from raymq.common.protocol.consume_result import StoreLog
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.records.format.memory_records import LocatedRecords
from raymq.remoting.access.stand_in import ActorOwner
from raymq.remoting.actor_ref import ActorGoneError, ActorNotSetUpError, HandleRef, raymq_errors
from raymq.remoting.storage_client import StorageClient

ACTOR_START_TIMEOUT_S: Final = 30.0
"""Extra time in s in a fetch's timeout, to allow for starting a PredicateRunner. The time is too short if a runtime_env
must be installed; the first fetches then time out."""


@dataclass(frozen=True, slots=True)
class GroupPredicate:
    """A consumer group, and the predicate of one of its subscriptions."""

    group: str
    predicate: Predicate

    def read_from(self, storage: StorageClient) -> PredicateStorage:
        """Return a PredicateStorage, which reads the store of `storage` through this predicate."""
        return PredicateStorage(storage, self)


class PredicateStorage:
    """Client of one storage actor that reads only the messages that match a predicate. `fetch` and `find` work like the
    StorageClient methods of the same names, but may also return FetchFailed results. Thread-safe."""

    def __init__(self, storage: StorageClient, group_predicate: GroupPredicate) -> None:
        self._storage = storage
        self._group, self._predicate = group_predicate.group, group_predicate.predicate
        self._lock = threading.Lock()
        """Guards the attributes that `__init__` assigns after this lock."""
        self._runner: tuple[str, HandleRef] | None = None
        """The current PredicateRunner, with the id of its node; None before the first fetch."""
        self._here: PredicateScan | None = None

    def fetch(
        self, requests: Sequence[FetchRequest], max_bytes: int, wait_s: float, timeout_s: float
    ) -> list[FetchResult]:
        """Read the messages that match the predicate from several queues (see PredicateScan.fetch). If the predicate's
        environment cannot be set up, all results are FetchFailed. Raises the errors of StorageClient.fetch."""
        if self._predicate.function is not None and self._storage.reader() is not None:
            return self._scan_here().fetch(requests, max_bytes, wait_s, timeout_s)
        timeout_s += wait_s + SCAN_S + self._predicate.timeout_s + CHILD_START_TIMEOUT_S
        runner, started = self._find_runner()
        if started:
            timeout_s += ACTOR_START_TIMEOUT_S
        try:
            results: list[FetchResult] = runner.call(
                "fetch", list(requests), max_bytes, wait_s, what=f"{self._predicate}.fetch", timeout_s=timeout_s
            )
            return results
        except ActorNotSetUpError as error:
            self._forget(runner)
            return self._not_set_up(requests, f"the predicate's runtime_env cannot be set up: {error.__cause__}")
        except ActorGoneError:
            self._forget(runner)
            # The PredicateRunner actor has ended, and its storage actor may have ended too. Send a fetch of 0 bytes to
            # the storage actor: if the storage actor has ended, this call raises its error and updates the
            # StorageClient.
            self._storage.fetch(requests, 0, 0.0, timeout_s)
            raise

    find = fetch

    def _scan_here(self) -> PredicateScan:
        broker_name = self._storage.describe().broker_name
        with self._lock:
            if self._here is None:
                self._here = PredicateScan(
                    self._storage,
                    partial(_evaluate_here, FunctionHere(self._predicate), broker_name),
                    name=self._predicate.text,
                    broker_name=broker_name,
                    in_place=True,
                )
            return self._here

    def _find_runner(self) -> tuple[HandleRef, bool]:
        """Return the PredicateRunner that runs on the storage actor's node in the name of this process's user. Creates
        the runner if needed. Also returns True if the runner may be new."""
        node_id, user = self._storage.describe().node_id, identity.present()
        with self._lock:
            if self._runner is not None and self._runner[0] == node_id:
                return self._runner[1], False
            options: dict[str, Any] = {}
            if self._predicate.runtime_env is not None:
                options["runtime_env"] = self._predicate.runtime_env
            names = (self._storage.name, node_id, self._group, self._predicate.key)
            name = str(PredicateName(*names, "" if user is None else user.user))
            with raymq_errors(f"starting the process of {self._predicate}"):
                handle = PredicateRunnerActor.options(
                    name=name,
                    namespace=INSTANCES,
                    get_if_exists=True,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                    **options,
                ).remote(
                    self._storage.name,
                    self._predicate,
                    user=user,
                    access=None if user is None else ActorOwner(name, user),
                )
            runner = HandleRef(name, handle, user)
            self._runner = (node_id, runner)
            return runner, True

    def _forget(self, runner: HandleRef) -> None:
        with self._lock:
            if self._runner is not None and self._runner[1] is runner:
                self._runner = None

    def _not_set_up(self, requests: Sequence[FetchRequest], reason: str) -> list[FetchResult]:
        broker_name = self._storage.describe().broker_name
        results: list[FetchResult] = []
        for request in requests:
            queue = MessageQueue(request.topic, broker_name, request.queue_id)
            error = PredicateFailedError(self._predicate.text, str(queue), request.queue_offset, reason)
            places = (request.queue_offset, 0, 0, b"", 0)
            results.append(FetchFailed(PullStatus.NO_MATCHED_MESSAGE, *places, error=error))
        return results


def _evaluate_here(
    function: FunctionHere, broker_name: str, records: LocatedRecords, until_s: float, log: StoreLog | None
) -> Evaluated:
    return function.evaluate(broker_name, records, until_s)
