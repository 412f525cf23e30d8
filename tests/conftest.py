"""Fixtures for several kinds of tests.

Each test module that starts Ray gets one embedded raymq, in a sandbox that is checked at the end. The embedded raymq
has two broker groups unless the module's `SETTINGS` define something else. Modules with equal settings share one
cluster if they leave the cluster intact. The modules of tests/integration/spark also share a Spark session.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

import raymq
from tests.durations import DurationRecorder, recorded_seconds
from tests.rotation import rotated_out
from tests.support.cases import SUMMARY, examples
from tests.support.clusters.cluster import SETTINGS, Sandbox, embedded, sandbox

HYPOTHESIS_EXAMPLES = 100
"""Number of examples that each Hypothesis test runs, equal to Hypothesis's own default."""
# In CI the Hypothesis examples are always the same, so that a change always gets the same result. Other runs try new
# examples each time. Examples have no deadline, because their duration depends on the machine's load.
PATIENT = settings(
    max_examples=examples(HYPOTHESIS_EXAMPLES), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", PATIENT, derandomize=True)
settings.register_profile("here", PATIENT)
settings.load_profile("ci" if os.environ.get("CI") else "here")

# Let Python cache the tests' bytecode, even if PYTHONDONTWRITEBYTECODE is set. Pytest rewrites the assertions of all
# tests, which takes 13 s of processor time in each worker; the cache saves this time in the next run.
sys.dont_write_bytecode = False

# Restore the ctrl-C handler. A shell's background job ignores ctrl-C. Programs that the tests start would ignore it
# too, so the tests could not interrupt these programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
RAY_CHAOS = [
    ("chaos", "clients"),
    ("chaos", "failovers"),
    ("chaos", "processes"),
    ("chaos", "ray_libraries"),
    ("chaos", "spark"),
    ("chaos", "transactions"),
]
NICE_MAX = 19
SHARING = {
    "clients": (
        "integration/clients/test_bad_input.py",
        "integration/clients/",
        "integration/serve/",
        "integration/examples/",
    ),
    "spark": ("integration/spark/",),
    "spark 4": (
        "chaos/spark/test_spark4_source.py",
        "chaos/spark/test_spark4_writes.py",
    ),
    "servers": (
        "integration/servers/test_queue_kinds.py",
        "integration/servers/test_push_consumer.py",
        "integration/servers/test_hostile_producer.py",
        "integration/servers/test_members.py",
        "integration/servers/test_live_settings.py",
        "integration/servers/test_control_plane.py",
    ),
    "kills": (
        "chaos/processes/test_recovery.py",
        "chaos/processes/test_faults_of_routes.py",
        "chaos/processes/test_tasks_over_restarts.py",
        "chaos/processes/test_kill_consumers.py",
        "chaos/processes/test_kill_simple_consumers.py",
        "chaos/processes/test_kill_broker.py",
        "chaos/processes/test_kill_storage_while_sending.py",
    ),
    "official clients": (
        "chaos/clients/test_official_clients.py",
        "chaos/clients/test_official_groups.py",
        "chaos/clients/test_official_faults.py",
        "chaos/clients/test_broker_group_away.py",
    ),
    "three replicas": (
        "chaos/processes/test_overlapping_faults.py",
        "chaos/processes/test_kill_gateways.py",
        "chaos/clients/test_official_kills.py",
        "chaos/failovers/test_replicas.py",
        "chaos/failovers/test_leases_over_failovers.py",
        "chaos/failovers/test_damaged_logs.py",
        "chaos/clients/test_official_failover.py",
        "chaos/spark/test_fail_over_scans.py",
    ),
}
"""Test files and folders that share a cluster, by the cluster's name. They run in this order.

Files that kill servers come last. test_bad_input.py comes first, because its tests compare all topics and groups of the
cluster: that takes 1 s of processor time if the other files have left theirs.
"""
LOCAL_SPARK = "local_spark"
"""Scope name of the tests in tests/component/spark, which share one Spark session."""


@cache
def group_of(path: Path) -> str:
    """Return the group of a test file, which depends on its folder: "ray" for tests on one Ray node, "nodes" for tests
    on several nodes, empty for tests without Ray."""
    folders = path.relative_to(TESTS).parts[:-1]
    if folders[:2] == ("chaos", "nodes"):
        return "nodes"
    return "ray" if folders[:1] == ("integration",) or folders[:2] in RAY_CHAOS else ""


@cache
def shared_by(path: Path) -> str:
    """Return the name of the cluster that a test file shares with other files; empty if the file shares no
    cluster."""
    file = path.relative_to(TESTS).as_posix()
    return next((name for name, places in SHARING.items() if file.startswith(places)), "")


@cache
def turn_of(path: Path) -> tuple[str, int]:
    """Return the sort key of a test file: the name of its shared cluster, and the file's index in the cluster's list.

    Files that share no cluster come first.
    """
    file = path.relative_to(TESTS).as_posix()
    name = shared_by(path)
    return name, next((index for index, place in enumerate(SHARING.get(name, ())) if file.startswith(place)), 0)


def has_local_spark(path: Path) -> bool:
    """Return True if the file's tests use the Spark session that all tests in tests/component/spark share."""
    return path.relative_to(TESTS).parts[:2] == ("component", "spark")


def scope_of(nodeid: str) -> str:
    """Return the scope of a test. A scope is a set of tests that one worker process runs together.

    A scope's name is the name of a shared cluster or session, "nodes" for tests on several nodes, or else the file's
    path below tests/.
    """
    return scope_of_file(nodeid.partition("::")[0])


@cache
def scope_of_file(file: str) -> str:
    """Return the scope of a test file's tests. `file`: the file's path below the repository's root directory."""
    path = TESTS.parent / file
    if shared := shared_by(path):
        return shared
    if has_local_spark(path):
        return LOCAL_SPARK
    return "nodes" if group_of(path) == "nodes" else str(path.relative_to(TESTS))


@cache
def group_of_scope(scope: str) -> str:
    """Return the group of a scope, a set of tests that run together: "ray", "nodes" or empty. `group_of` returns the
    group of a file."""
    if scope in SHARING:
        return "ray"
    if scope == LOCAL_SPARK:
        return ""
    return scope if scope == "nodes" else group_of(TESTS / scope)


class RayApart(LoadScopeScheduling):
    """A scheduler of pytest-xdist that separates tests on Ray from tests without Ray.

    With two workers, the first runs the tests on one Ray node, cluster by cluster. The second runs the tests without
    Ray, file by file, and afterwards the tests with several nodes. Tests on Ray mostly wait, so the two workers fill
    two cores. A worker that has finished its own kind of tests runs tests of the other kind. Each worker runs the
    scopes (sets of tests) with the longest recorded time first, so that both workers end at about the same time.

    The scheduler does not use pytest-xdist's marks for groups, because pytest-xdist does not see these marks with
    pytest 9.2.
    """

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self._seconds = recorded_seconds()

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        order = ("ray", "", "nodes") if node is self.nodes[0] else ("", "nodes", "ray")
        self.workqueue.move_to_end(next_scope(self.workqueue, order, self._seconds), last=False)
        super()._assign_work_unit(node)


def next_scope(scopes: Iterable[str], order: Sequence[str], seconds: Mapping[str, int]) -> str:
    """Return the scope (set of tests) that a worker runs next: the longest scope of the first group in `order` that has
    a scope. If several are equally long, return the first of them.

    `seconds`: the recorded seconds by scope. A scope without a record counts as short.
    """
    return min(scopes, key=lambda scope: (order.index(group_of_scope(scope)), -seconds.get(scope, 0)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write how long each scope takes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationRecorder(scope_of))


# Run this hook first, because pytest's own hook selects tests by the marks that this hook adds.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests of shared clusters, mark each test in tests/chaos as long, and leave out the tests whose turn it
    is not (tests/rotation.py)."""
    left_out = [item for item in items if rotated_out(item.path.relative_to(TESTS).as_posix())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=lambda item: turn_of(item.path))
    for item in items:
        if in_chaos(item.path):
            item.add_marker(pytest.mark.long)


@cache
def in_chaos(path: Path) -> bool:
    """Return True if the test file is below tests/chaos."""
    return path.is_relative_to(TESTS / "chaos")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without Python's garbage collector, and keep the collected objects out of later collections.

    A worker collects 11,000 tests. The garbage collector would visit the growing number of objects again and again, and
    each `gc.collect()` of a test would visit all of them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the texts that passed tests have recorded as the property SUMMARY, whichever worker ran the tests."""
    for report in terminalreporter.getreports("passed"):
        for name, text in report.user_properties:
            if name == SUMMARY:
                terminalreporter.section(report.nodeid)
                terminalreporter.write_line(str(text))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RayApart:
    return RayApart(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the priority of the worker process. Tests without Ray use much CPU time, so they get a higher niceness than
    Ray's workers, whose niceness is 15. Otherwise Ray's workers would hardly run."""
    if hasattr(item.config, "workerinput"):
        try:
            os.setpriority(os.PRIO_PROCESS, 0, 0 if group_of(item.path) else NICE_MAX)
        except PermissionError:
            return  # Without root rights, a process cannot lower its niceness again.


class SharedCluster:
    """An embedded raymq in a sandbox. Several test modules share it, one module after another.

    The cluster starts for the first module that needs it. It ends before the first module that does not need it. Then
    the sandbox is checked.
    """

    def __init__(self) -> None:
        self.name = ""
        """Name of the cluster that the present test module shares; empty if it shares no cluster."""
        self._settings = ""
        self._failures = 0
        self._open = ExitStack()
        self._box: Sandbox | None = None
        self._client: raymq.Client | None = None
        self._spark: Any = None
        self._spark4: Any = None

    def enter(self, name: str, failures: int) -> None:
        """Prepare for a test module that shares the cluster `name`, or no cluster if `name` is empty. Ends a cluster
        with another name.

        `failures`: number of failed tests so far. If a test failed in a cluster, no later module uses this cluster.
        """
        if name != self.name or failures > self._failures:
            self.close()
        self.name, self._failures = name, failures

    def box(self, settings: str) -> Sandbox:
        """Return the shared cluster's sandbox. If no sandbox exists, creates one with `settings`. The settings of an
        existing sandbox must equal `settings`."""
        if self._box is None:
            self._box, self._settings = self._open.enter_context(sandbox(settings)), settings
        assert settings == self._settings, f"the modules that share {self.name!r} have different settings"
        return self._box

    def client(self) -> raymq.Client:
        """Return the client of the shared cluster. Starts the cluster if it does not run."""
        if self._client is None:
            self._client = self._open.enter_context(embedded(self.box(self._settings)))
        return self._client

    def spark(self) -> Any:
        """Return the Spark session on the shared cluster. Starts a session if none runs."""
        if self._spark is None:
            self.client()
            # Import this module only when it is needed, because most tests need no Spark.
            from tests.support.clusters.spark import session_without_leftovers

            self._spark = self._open.enter_context(session_without_leftovers(self.box(self._settings)))
        return self._spark

    def spark4(self, directory: Path) -> Any:
        """Return the Spark 4 session on the shared cluster, a Spark4Session of tests.support. Starts a session if none
        runs. `directory`: an empty directory, for a session that starts."""
        if self._spark4 is None:
            self.client()
            from tests.support.spark.spark4 import spark4_beside_ray

            self._spark4 = self._open.enter_context(spark4_beside_ray(directory))
        return self._spark4

    def close(self) -> None:
        """End the shared cluster and remove its sandbox."""
        opened, self._open = self._open, ExitStack()
        self._box = self._client = self._spark = self._spark4 = None
        opened.close()


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    tmp_path_factory.getbasetemp()  # Make pytest choose its temporary directory before TMPDIR changes.
    shared = SharedCluster()
    yield shared
    shared.close()


@pytest.fixture(scope="module", autouse=True)
def _no_cluster_of_others(shared_cluster: SharedCluster, request: pytest.FixtureRequest) -> None:
    """End the shared cluster before a test module that does not use it."""
    shared_cluster.enter(shared_by(request.path), request.session.testsfailed)


@pytest.fixture(scope="module")
def box(shared_cluster: SharedCluster, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """Yield the test module's sandbox. Its raymq.yaml has the module's `SETTINGS`, or the default settings if the
    module defines none."""
    settings = getattr(request.module, "SETTINGS", SETTINGS)
    if shared_by(request.path):
        yield shared_cluster.box(settings)
        return
    with sandbox(settings) as made:
        yield made


@pytest.fixture(scope="module")
def mq(box: Sandbox, shared_cluster: SharedCluster, request: pytest.FixtureRequest) -> Iterator[raymq.Client]:
    if shared_by(request.path):
        yield shared_cluster.client()
        return
    with embedded(box) as client:
        yield client


@pytest.fixture
def topic(mq: raymq.Client, request: pytest.FixtureRequest) -> str:
    """Create a topic with four queues for the test, two in each broker group. Returns the topic's name."""
    name = re.sub(r"[^a-zA-Z0-9_-]", "-", request.node.name)[:120]
    mq.admin.create_topic(name, queues=4)
    return name


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """Return the name of a consumer group that only this test uses."""
    return "g-" + re.sub(r"[^a-zA-Z0-9_-]", "-", request.node.name)[:110]


@pytest.fixture
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace flushes by functions that do nothing, for tests that open many stores and do not need durable
    data."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
