"""Tests of the messages between a client and the launch process. A fake process answers."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import textwrap

import pytest

from raymq.client.cluster import launcher
from raymq.common.config.cluster import ClusterSettings
from raymq.common.errors import RequestTimeoutError, ServiceNotAvailableError, StoreLockedError


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Return a function that makes the client start a given program as the launch process, instead of
    placement.launcher_main."""
    start = subprocess.Popen

    def install(program: str) -> None:
        path = tmp_path / "child.py"
        path.write_text("import json, sys, os, time, signal\n" + textwrap.dedent(program))

        def popen(command, **options):
            assert command[1:] == ["-P", "-m", "raymq.client.cluster.server_path", "placement.launcher_main"]
            assert options["cwd"] == "/"
            return start([sys.executable, "-I", "-S", str(path)], **options)

        monkeypatch.setattr(launcher.subprocess, "Popen", popen)

    return install


def test_the_request_is_sent_and_progress_and_result_come_back(child):
    child(
        """
        request = json.loads(sys.stdin.readline())
        print(json.dumps({"progress": "first"}), flush=True)
        print("a line of Ray's", flush=True)
        print("[1, 2]", flush=True)
        print(json.dumps({"progress": "second"}), flush=True)
        print(json.dumps({"result": [request, sys.stdin.read()]}), flush=True)
        """
    )
    steps: list[str] = []
    settings = ClusterSettings(broker_groups=2)
    request, rest = launcher.launch("start", "127.0.0.1:6379", settings, steps.append)
    assert steps == ["first", "second"]
    assert (request["action"], request["address"], rest) == ("start", "127.0.0.1:6379", "")
    assert ClusterSettings(**request["settings"]) == settings


def test_arguments_of_an_action_are_sent_along(child):
    child("print(json.dumps({'result': json.loads(sys.stdin.readline())}))")
    request = launcher.launch("drain", "address", node="10.0.0.7", undo=False)
    assert (request["action"], request["node"], request["undo"]) == ("drain", "10.0.0.7", False)


@pytest.mark.parametrize("value", [None, [], {}, 0])
def test_a_result_may_be_empty(child, value):
    child(f"sys.stdin.read()\nprint({json.dumps(json.dumps({'result': value}))})")
    assert launcher.launch("status", "address") == value


def test_the_error_of_the_servers_is_raised_as_it_is(child):
    error = base64.b64encode(pickle.dumps(StoreLockedError("/data", "pid 7"))).decode()
    child(f"sys.stdin.read()\nprint({json.dumps(json.dumps({'error': error}))})")
    with pytest.raises(StoreLockedError) as caught:
        launcher.launch("start", "address", ClusterSettings())
    assert caught.value.holder == "pid 7"


def test_a_child_that_ends_without_an_answer_leaves_its_last_words(child):
    child(
        """
        sys.stdin.read()
        sys.stderr.write("".join(f"line {number}\\n" for number in range(30)))
        sys.exit(3)
        """
    )
    with pytest.raises(ServiceNotAvailableError, match="exit code 3") as caught:
        launcher.launch("start", "address")
    assert "line 29" in str(caught.value)
    assert "line 10\n" in str(caught.value)
    assert "line 9\n" not in str(caught.value)


def test_a_child_that_never_reads_its_request_leaves_its_last_words_too(child):
    child("os.close(0); sys.stderr.write('no such module'); sys.stderr.flush(); os._exit(1)")
    with pytest.raises(ServiceNotAvailableError, match="no such module"):
        launcher.launch("start", "address", ClusterSettings(cluster_name="c" * 64))


def test_a_child_that_crashes_is_not_taken_for_a_slow_one(child):
    child("sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ServiceNotAvailableError, match="exit code -9"):
        launcher.launch("start", "address")


def test_a_child_that_writes_much_to_standard_error_does_not_block(child):
    child(
        """
        sys.stdin.read()
        sys.stderr.write("x" * 79 + "\\n" * 5000)
        sys.stderr.write(("x" * 79 + "\\n") * 5000)
        print(json.dumps({"result": "done"}))
        """
    )
    assert launcher.launch("status", "address") == "done"


def test_a_child_that_takes_too_long_is_killed(child, monkeypatch):
    monkeypatch.setattr(launcher, "LAUNCHER_TIMEOUT_S", 0.2)
    child("sys.stdin.read(); signal.pause()")
    with pytest.raises(RequestTimeoutError, match=r"start of raymq's servers did not complete within 0\.2 s"):
        launcher.launch("start", "address")


def test_an_interrupted_start_lets_the_child_stop_started_servers(child, tmp_path):
    done = tmp_path / "stopped"
    child(
        f"""
        def stop(*_):
            open({str(done)!r}, "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, stop)
        sys.stdin.read()
        print(json.dumps({{"progress": "started half of it"}}), flush=True)
        while True:
            signal.pause()
        """
    )

    def interrupt(step: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launcher.launch("start", "address", progress=interrupt)
    assert done.exists()
