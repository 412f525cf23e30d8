"""Runs a whole raymq cluster in the process of a test program, without Ray. The servers are real, and clients reach
them over real lanes (direct socket connections).

    connect() → RouteCache, StorageClients, lanes …           the real client
    ray.get_actor, Actor.options().remote(), ray.get, ray.kill  → LocalRay: objects of this process, threads for calls
    NameServer, Storage, Broker, Rebalance, Pull, Listener      the real classes

LocalRay replaces functions of Ray's modules and does not restore them. Use LocalRay in separate programs, not in tests
that run in the process of pytest.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError as FutureTimeoutError
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import ray
import ray.util
from ray.actor import ActorClass
from ray.exceptions import ActorDiedError, GetTimeoutError

NODE: Final = "0" * 56
HOST: Final = "127.0.0.1"
START_TIMEOUT_S: Final = 60.0


class Reference(Future[Any]):
    """The pending result of an actor call, which `ray.get` waits for."""


class LocalActor:
    """An actor that runs in this process. The object is also the actor's handle. Each call of the actor runs in a new
    thread."""

    def __init__(self, cluster: LocalRay, key: tuple[str, str], real: type, arguments: Any, keywords: Any) -> None:
        self._cluster, self.key, self._dead = cluster, key, False
        self._object: Any = None
        with cluster.inside(self):
            self._object = real(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *arguments, **keywords: self._call(name, arguments, keywords))

    def _call(self, name: str, arguments: Any, keywords: Any) -> Reference:
        reference = Reference()

        def run() -> None:
            try:
                with self._cluster.inside(self):
                    result = getattr(self._object, name)(*arguments, **keywords)
            except BaseException as error:  # the caller of the actor's method gets the error, as in Ray
                reference.set_exception(error)
            else:
                reference.set_result(result)

        if self._dead:
            reference.set_exception(ActorDiedError())
        else:
            threading.Thread(target=run, name=f"{self.key[1]}.{name}", daemon=True).start()
        return reference


class LocalRay:
    """A replacement for the part of Ray's API that raymq uses. Actors are objects of this process."""

    def __init__(self) -> None:
        self._actors: dict[tuple[str, str], LocalActor] = {}
        self._register: dict[str, bytes] = {}
        self._lock = threading.RLock()
        self._present = threading.local()
        self._names = itertools.count()

    def install(self) -> None:
        """Replace functions of the module `ray` by functions of this simulated cluster, until the process ends."""
        ray.get_actor = lambda name, namespace=None: self.find(str(namespace), name)
        ray.get = _get
        ray.kill = lambda handle, no_restart=True: self.kill(handle)
        ray.is_initialized = lambda: True
        ray.nodes = lambda: [{"NodeID": NODE, "Alive": True, "NodeManagerAddress": HOST, "Resources": {}}]
        ray.shutdown = lambda: None
        ray.get_runtime_context = self._context
        ray.util.get_node_ip_address = lambda: HOST
        ray.util.list_named_actors = lambda all_namespaces=False: [
            {"namespace": namespace, "name": name} for namespace, name in self._actors
        ]
        ActorClass.options = lambda kind, **options: SimpleNamespace(  # type: ignore[method-assign]
            remote=lambda *arguments, **keywords: self._make(kind, options, arguments, keywords)
        )
        register = import_module("actors.register")
        register._internal_kv_get = lambda key, namespace: self._register.get(key)
        register._internal_kv_put = self._put
        register._internal_kv_del = lambda key, namespace: self._register.pop(key, None)

    def find(self, namespace: str, name: str) -> LocalActor:
        """Return the handle of an actor. Raises ValueError if the actor does not exist, as Ray does."""
        try:
            return self._actors[namespace, name]
        except KeyError:
            raise ValueError(f"no actor is called {name!r}") from None

    def kill(self, handle: LocalActor | None) -> None:
        """Kill an actor: it answers no further calls, but its threads continue."""
        if handle is not None:
            handle._dead = True
            self._actors.pop(handle.key, None)

    def names(self) -> list[tuple[str, str]]:
        """Return the namespace and name of each actor."""
        return list(self._actors)

    def inside(self, actor: LocalActor) -> _Inside:
        """Return a context manager that makes Ray's runtime context report `actor` as the current actor of this
        thread."""
        return _Inside(self._present, actor)

    def _context(self) -> Any:
        return SimpleNamespace(
            get_node_id=lambda: NODE,
            get_worker_id=lambda: "worker",
            get_actor_name=lambda: "",
            was_current_actor_reconstructed=False,
            current_actor=getattr(self._present, "actor", None),
            gcs_address="local",
        )

    def _make(self, kind: Any, options: dict[str, Any], arguments: Any, keywords: dict[str, Any]) -> LocalActor:
        stand_in = kind.__ray_metadata__.modified_class
        real = getattr(import_module(stand_in.__module__), stand_in.__name__)
        keywords.pop("access", None)
        namespace = options.get("namespace", "raymq")
        key = namespace, options.get("name") or f"unnamed-{next(self._names)}"
        with self._lock:
            if key in self._actors:
                if options.get("get_if_exists"):
                    return self._actors[key]
                raise ValueError(f"the name {key[1]!r} is taken")
            made = self._actors[key] = LocalActor(self, key, real, arguments, keywords)
            return made

    def _put(self, key: str, value: str, overwrite: bool, namespace: str) -> bool:
        with self._lock:
            existed = key in self._register
            if overwrite or not existed:
                self._register[key] = value.encode()
            return existed


class _Inside:
    def __init__(self, present: threading.local, actor: LocalActor) -> None:
        self._present, self._actor = present, actor

    def __enter__(self) -> None:
        self._before = getattr(self._present, "actor", None)
        self._present.actor = self._actor

    def __exit__(self, *raised: object) -> None:
        self._present.actor = self._before


def _get(reference: Any, timeout: float | None = None) -> Any:
    try:
        return reference.result(timeout)
    except FutureTimeoutError as error:
        if reference.done():  # the call itself raised a TimeoutError; the wait did not time out
            raise
        raise GetTimeoutError(f"not in {timeout} s") from error


def start_cluster(root: Path, **settings: Any) -> LocalRay:
    """Start a raymq cluster of one broker group with its store below `root`. Afterwards `raymq.connect()` finds the
    cluster.

    `settings`: further fields of ClusterSettings.
    """
    local = LocalRay()
    local.install()
    launch, plan = import_module("placement.launch"), import_module("placement.plan")
    from placement.replica_nodes import Node
    from raymq.common.config.cluster import ClusterSettings
    from raymq.common.config.metrics import MetricsOptions

    values = {"data_dir": root, "rebalance_servers": 1, "metrics": MetricsOptions(enable=False), **settings}
    made = plan.make_plan(ClusterSettings(**values), [Node(NODE, HOST)])
    progress: Callable[[str], None] = lambda step: None  # noqa: E731  # the type is launch's
    launch._start(made, progress, time.monotonic() + START_TIMEOUT_S, {})
    return local
