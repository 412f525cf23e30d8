"""Tests of the configuration of a Spark session. The tests start no Spark process."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
from py4j.protocol import Py4JError, Py4JNetworkError
from ray.exceptions import RaySystemError

from raydp_jobs import START_TIMEOUT_VARIABLE, session as sessions
from raydp_jobs.session import spark_configs, spark_session
from raymq.common.errors import ClientStateError, InvalidArgumentError, RequestTimeoutError
from tests.support.clients.fakes import WAIT_S


def test_java_options_of_the_user_are_added_to_the_options_for_java_17() -> None:
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
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: object())
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
    def missing(name: str, namespace: str | None) -> object:
        raise ValueError(f"no actor {name}")

    with sessions._watched("report-1", gateway):
        monkeypatch.setattr(ray, "get_actor", missing)
        assert gateway.proc.wait(60) == -signal.SIGKILL
    with pytest.raises(ClientStateError, match="report-1 has ended: the session's application master has ended"):
        lose_the_connection(gateway)


def test_a_watched_session_continues_while_ray_does_not_answer(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Semaphore(0)

    def silent(name: str, namespace: str | None) -> object:
        asked.release()
        raise ray.exceptions.RayError("no answer")

    monkeypatch.setattr(ray, "get_actor", silent)
    with sessions._watched("report-1", gateway):
        assert asked.acquire(timeout=60)
        assert asked.acquire(timeout=60)
    assert gateway.proc.poll() is None


def test_the_error_of_a_dead_session_names_the_dead_process(
    gateway: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If no process of the Spark session has ended, the caller gets Py4J's original error.
    with pytest.raises(Py4JNetworkError):
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


@pytest.mark.parametrize(("text", "expected"), [(None, 120.0), ("", 120.0), ("300", 300.0), ("0.5", 0.5)])
def test_the_environment_sets_the_time_for_a_start(
    monkeypatch: pytest.MonkeyPatch, text: str | None, expected: float
) -> None:
    if text is None:
        monkeypatch.delenv(START_TIMEOUT_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(START_TIMEOUT_VARIABLE, text)
    assert sessions.default_start_timeout_s() == expected


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_time_in_the_environment_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(START_TIMEOUT_VARIABLE, text)
    with pytest.raises(InvalidArgumentError, match=rf"{START_TIMEOUT_VARIABLE} must be a number .* not '{text}'"):
        sessions.default_start_timeout_s()


def test_a_late_start_is_one_error_without_the_tracebacks_of_py4j(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed = threading.Event()
    monkeypatch.setattr(sessions, "_kill", lambda name: killed.set())
    monkeypatch.setattr(sessions, "_logs", lambda: "the logs")
    loggers = [logging.getLogger(name) for name in (None, "py4j.java_gateway", "py4j.clientserver")]
    before = [(list(logger.filters), list(logger.handlers)) for logger in loggers]

    def fail_after_the_deadline() -> None:
        assert killed.wait(WAIT_S)
        for logger in loggers:
            logger.error("Exception while sending command.")
        raise Py4JError("the answer from Java is empty")

    with pytest.raises(RequestTimeoutError, match=START_TIMEOUT_VARIABLE) as caught, sessions._deadline("late", 0.01):
        fail_after_the_deadline()
    assert caplog.records == []
    assert len(traceback.format_exception(caught.value)) < 20
    assert "Py4JError" not in "".join(traceback.format_exception(caught.value))
    assert [(list(logger.filters), list(logger.handlers)) for logger in loggers] == before


def test_a_late_start_kills_the_jvm_although_ray_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = threading.Event()

    def fail(name: str) -> None:
        raise RaySystemError("the GCS is gone")

    monkeypatch.setattr(sessions, "_kill", fail)
    monkeypatch.setattr(sessions, "_logs", lambda: "the logs")
    gateway = SimpleNamespace(proc=SimpleNamespace(kill=killed.set))
    monkeypatch.setattr(sessions, "driver_gateway", lambda: gateway)

    def fail_after_the_deadline() -> None:
        assert killed.wait(WAIT_S)
        raise Py4JError("the answer from Java is empty")

    with pytest.raises(RequestTimeoutError), sessions._deadline("late", 0.01):
        fail_after_the_deadline()


def test_an_error_of_a_start_in_time_is_not_hidden(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        logging.getLogger("py4j.java_gateway").error("a warning of Py4J")
        raise Py4JError("its own error")

    with pytest.raises(Py4JError, match="its own error"), sessions._deadline("early", WAIT_S):
        fail()
    assert "a warning of Py4J" in caplog.text
