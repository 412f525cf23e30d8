"""Helpers for clusters with access control: run a program as a user, and find the actor calls that a user may make.

This module and the tests that use it must be pickled by value, because Ray's workers cannot import test modules.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from raymq.client.predicates.source import GroupPredicate
from raymq.common import identity
from raymq.common.errors import AccessDeniedError, AuthenticationError
from raymq.common.protocol.store import FetchRequest
from raymq.remoting import actor_ref
from raymq.remoting.access.requests import rules_of
from raymq.remoting.storage_client import StorageClient
from tests.support.clusters.cluster import Sandbox, embedded, one_group
from tests.support.ports import free_port

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ADMIN = raymq.Credentials("admin", "the secret of admin")
"""Credentials of the super user of `access_cluster`."""
CALL_S = 120.0
OWN_KINDS = (
    "nameserver-",
    "broker-",
    "storage-",
    "replicator-",
    "controller",
    "rebalance-",
    "console",
    "gateway-",
    "pull-",
)
"""Prefixes of the names of raymq's actors in a cluster with replicas, a console, a gateway and a push consumer."""


@contextmanager
def access_cluster(box: Sandbox, files: Path, users: str) -> Iterator[raymq.Client]:
    """Yield the super user's client of a cluster with access control, two replicas, a console and a gateway.

    The gateway may call web hooks on this machine. `users`: text of the users file. `files`: a directory for the users
    file and for the super user's secret.
    """
    for name, text in (("secret", ADMIN.secret), ("users", users)):
        (files / name).write_text(text)
        (files / name).chmod(0o600)
    access = f"{{enable: true, super_secret_file: {files}/secret, users_file: {files}/users}}"
    (box.work / "raymq.yaml").write_text(
        one_group("{replicas: 2, spread: false, min_in_sync_replicas: 2}")
        + f"data_dir: {box.data}\naccess: {access}\nconsole: {{enable: true, port: 0}}\n"
        f"gateway: {{enable: true, port: {free_port()}, http_port: {free_port()}, "
        'webhook_hosts: ["http://127.0.0.1"]}\n'
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAYMQ_USER", ADMIN.user)
        environment.setenv("RAYMQ_SECRET", ADMIN.secret)
        with embedded(box) as client:
            try:
                yield client
            finally:
                for credentials in list(_programs):
                    _end_program(credentials)


@ray.remote(num_cpus=0)
class Program:
    """A program that runs with the credentials of one user."""

    def __init__(self, credentials: raymq.Credentials | None) -> None:
        for name in ("RAYMQ_USER", "RAYMQ_SECRET"):
            os.environ.pop(name, None)
        self._credentials = credentials

    def run(self, work: Callable[[raymq.Client], Any]) -> Any:
        """Run `work` with a client that has the user's credentials, and return the result."""
        with raymq.connect(credentials=self._credentials) as client:
            return work(client)


def as_user(credentials: raymq.Credentials | None, work: Callable[[raymq.Client], Any]) -> Any:
    """Run `work` in a separate program that connects with `credentials`. Returns the result of `work`, or raises its
    error.

    Each user has one program for all calls until `access_cluster` ends, because a new program takes more than a second
    of processor time. Each call makes a new connection.
    """
    if credentials not in _programs:
        _programs[credentials] = Program.remote(credentials)
    try:
        return ray.get(_programs[credentials].run.remote(work), timeout=CALL_S)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError:  # the program has ended, or does not answer
        _end_program(credentials)
        raise


_programs: dict[raymq.Credentials | None, Any] = {}
"""The actor `Program` of each user. None is the key of the program without credentials."""


def _end_program(credentials: raymq.Credentials | None) -> None:
    ray.kill(_programs.pop(credentials))


def consume_with_predicates(topic: str, group: str, stop: Path) -> Callable[[raymq.Client], int]:
    """Return a function to run with `as_user`. It consumes messages of the topic with two predicates until the file
    `stop` exists.

    The function runs a push consumer, its Pull actor and the actors of the predicates. It returns the number of records
    that passed a predicate.
    """

    def work(client: raymq.Client) -> int:
        consumer = client.push_consumer(group, consume_from=raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
        consumer.subscribe(topic, raymq.predicate(lambda message: True, name="all"))
        with consumer.on_message(lambda message: None).start():
            node = ray.get_runtime_context().get_node_id()
            shipped = pickle.loads(pickle.dumps(raymq.predicate(lambda message: True, name="own")))
            # Pickle the predicate, so that it runs in a predicate actor. A predicate that was not pickled would run in
            # this process.
            readers = [
                GroupPredicate(group, shipped).read_from(StorageClient(f"storage-broker-a-{replica}", node))
                for replica in range(2)
            ]
            requests = [FetchRequest(topic, queue_id, 0, 32) for queue_id in range(2)]
            until_s, found = time.monotonic() + CALL_S, 0
            while not stop.exists() and time.monotonic() < until_s:
                for reader in readers:
                    # Only the master serves fetches. On a busy machine, late heartbeats can change the master.
                    with suppress(raymq.NotMasterError):
                        found += sum(
                            len(result.records)
                            for one in requests
                            for result in reader.fetch([one], 1 << 20, 0.0, CALL_S)
                        )
                time.sleep(0.1)
            return found

    return work


def all_own_kinds_run() -> bool:
    """Return whether all kinds of raymq's actors have a running actor, and exactly two users have predicate
    actors."""
    names = [name for _, name in named_actors()]
    users = {name.rpartition("-")[2] for name in names if name.startswith("predicate-")}
    return len(users) == 2 and all(any(name.startswith(kind) for name in names) for kind in OWN_KINDS)


def named_actors() -> dict[tuple[str, str], Any]:
    """Return the handles of all named actors of the cluster, in all namespaces, by namespace and name."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return {(one["namespace"], one["name"]): ray.get_actor(one["name"], namespace=one["namespace"]) for one in listed}


def class_of(handle: Any) -> str:
    """Return the name of an actor's class without its module. For a replica of Ray Serve the name lacks the
    application's name, too."""
    return str(handle._ray_actor_creation_function_descriptor.class_name.rpartition(".")[2].partition(":")[0])


def arguments(handle: Any, method: str) -> tuple[tuple[None, ...], dict[str, None]]:
    """Return arguments with which an actor's method can be called: None for each required argument. The result has the
    positional arguments and the keyword arguments."""
    needed = [one for one in handle._ray_method_signatures[method] if one.default is one.empty]
    by_name = {one.name: None for one in needed if one.kind is one.KEYWORD_ONLY}
    return (None,) * sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in needed), by_name


def served(foreign: Collection[str] = ()) -> Callable[[raymq.Client], list[str]]:
    """Return a function that checks a user's access to all named actors. It returns the violations of the table of
    permitted requests.

    A call is a violation if it succeeds although it is unsigned, or although the table does not list its method. A
    method without a signed variant is a violation, too. The classes in `foreign` are not checked.
    """

    def work(client: raymq.Client) -> list[str]:
        me, failures = identity.present(), []
        assert me is not None
        for (_, name), handle in named_actors().items():
            server = class_of(handle)
            if server in foreign:
                continue
            methods = {one.removeprefix("signed_") for one in dir(handle) if one.startswith("signed_")}
            plain = {one for one in dir(handle) if not one.startswith(("_", "signed_"))}
            if not methods == plain != set():
                failures.append(f"{server} {name}: it checks the user in {sorted(methods)} of {sorted(plain)}")
                continue
            calls = []
            for one in methods:
                args, by_name = arguments(handle, one)
                calls.append((f"{one}, plain", getattr(handle, one).remote(*args, **by_name)))
            unsigned = [(one, getattr(handle, f"signed_{one}").remote(None, b"")) for one in methods]
            calls += [(f"{one}, no signature", reference) for one, reference in unsigned]
            for method in methods - rules_of(server).keys():
                heard = actor_ref._signed(me, name, method, *arguments(handle, method))
                calls.append((f"{method}, signed", getattr(handle, f"signed_{method}").remote(*heard)))
            for what, reference in calls:
                try:
                    actor_ref.resolve(reference, what, CALL_S)
                    failures.append(f"{name}: {what}")
                except (AuthenticationError, AccessDeniedError):
                    continue
        return failures

    return work
