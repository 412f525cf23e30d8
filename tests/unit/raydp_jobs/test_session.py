"""Tests of the configuration of a Spark session. The tests start no Spark process."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
from py4j.protocol import Py4JNetworkError

from raydp_jobs import session as sessions
from raydp_jobs.session import spark_configs, spark_session
from raymq.common.errors import ClientStateError, InvalidArgumentError


def test_java_options_of_the_user_are_added_to_those_that_java_17_needs() -> None:
    configs = spark_configs({"spark.executor.extraJavaOptions": "-Dmine=1"})
    assert configs["spark.executor.extraJavaOptions"].endswith(" -Dmine=1")
    for role in ("spark.driver", "spark.executor", "spark.ray.raydp_app_master"):
        assert "--add-opens=java.base/java.math=ALL-UNNAMED" in configs[f"{role}.extraJavaOptions"]


def test_other_settings_of_the_user_win_and_the_mapping_given_is_left_alone() -> None:
    given = {"spark.ui.enabled": "true", "spark.sql.shuffle.partitions": "4"}
    configs = spark_configs(given)
    assert configs.items() >= given.items()
    assert given == {"spark.ui.enabled": "true", "spark.sql.shuffle.partitions": "4"}


@pytest.mark.parametrize("sizes", [{"executors": 0}, {"executor_cores": 0}])
def test_an_empty_session_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(InvalidArgumentError), spark_session("nothing", **sizes):  # type: ignore[arg-type]
        pytest.fail("unreachable")


def test_a_session_without_a_connection_to_ray_is_refused_before_raydp_starts_a_ray_of_its_own() -> None:
    with pytest.raises(ClientStateError, match=r"raymq\.connect"), spark_session("nothing"):
        pytest.fail("unreachable")


# Tests of a Spark session whose processes end while the session is open. Another process stands in for the driver's
# JVM.


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Yield a fake Py4J gateway with a process that runs until it is killed. Ray is a fake, too, and reports that all
    actors are alive."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(sessions, "_actor", lambda name: object())
    monkeypatch.setattr(sessions, "_session_directory", lambda: "/ray/session")
    monkeypatch.setattr(sessions, "_WATCH_S", 0.01)
    monkeypatch.setattr(sessions, "_SETTLE_S", 0.05)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield SimpleNamespace(proc=process)
        process.kill()


def lose_the_connection(gateway: SimpleNamespace) -> None:
    with sessions._explained("report-1", gateway):
        raise Py4JNetworkError("Error while sending or receiving")


def test_a_session_without_its_application_master_ends_instead_of_waiting(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sessions._watched("report-1", gateway):
        monkeypatch.setattr(sessions, "_actor", lambda name: None)
        assert gateway.proc.wait(60) == -signal.SIGKILL
    with pytest.raises(ClientStateError, match="report-1 ended meanwhile: its application master is gone"):
        lose_the_connection(gateway)


def test_a_watched_session_goes_on_while_ray_does_not_answer(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Semaphore(0)

    def silent(name: str) -> object:
        asked.release()
        raise ray.exceptions.RayError("no answer")

    monkeypatch.setattr(sessions, "_actor", silent)
    with sessions._watched("report-1", gateway):
        assert asked.acquire(timeout=60)
        assert asked.acquire(timeout=60)
    assert gateway.proc.poll() is None


def test_an_error_of_a_session_that_lost_something_says_what(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Py4JNetworkError):  # all processes of the session are alive, so the original error is raised
        lose_the_connection(gateway)
    gateway.proc.kill()
    gateway.proc.wait()
    with pytest.raises(ClientStateError, match="the driver's Java process was killed by signal 9"):
        lose_the_connection(gateway)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClientStateError, match="no longer connected to Ray"):
        lose_the_connection(gateway)


def test_an_interrupt_after_a_session_is_handled_as_before_it() -> None:
    before = signal.getsignal(signal.SIGINT)
    with sessions._interrupts_as_before():
        signal.signal(signal.SIGINT, lambda number, frame: None)
    assert signal.getsignal(signal.SIGINT) is before
