"""Tests of how `raymq doctor` collects facts, on real directories, processes and servers of this machine,
without Ray."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from raymq.common.message import MessageQueue
from raymq.common.protocol.attributes import CleanupPolicy, TopicAttributes
from raymq.common.protocol.group import GroupQueueProgress, GroupSummary
from raymq.tools.doctor.collect.cluster import collect_port, collect_prometheus, group_facts, health_checks
from raymq.tools.doctor.collect.machine import collect_directory, collect_machine, readable_by_others
from raymq.tools.doctor.examination import fix


def test_a_directory_is_looked_at_and_left_as_it_was(tmp_path: Path):
    tmp_path.chmod(0o700)
    facts = collect_directory(tmp_path, 0.75, 0.9)
    assert (facts.exists, facts.writable, facts.error) == (True, True, "")
    assert facts.file_system
    assert 0 <= facts.used_ratio <= 1
    assert len(facts.fdatasync_ms) in range(1, 51)
    assert list(facts.fdatasync_ms) == sorted(facts.fdatasync_ms)
    assert (facts.readable_count, facts.locks) == (0, {})
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_judged_by_the_one_above(tmp_path: Path):
    facts = collect_directory(tmp_path / "a/b", 0.75, 0.9)
    assert (facts.exists, facts.existing_path) == (False, str(tmp_path))
    assert not (tmp_path / "a").exists()


def test_a_directory_in_which_no_file_can_be_made_is_named_with_the_reason():
    """The error names a directory in which no file can be created, and the reason. The test uses a directory in which
    even root cannot create files."""
    assert collect_directory(Path("/proc/a"), 0.75, 0.9).error == "/proc cannot be used: No such file or directory"


def test_the_holder_of_a_stores_lock_is_found_without_taking_the_lock(tmp_path: Path):
    (tmp_path / "broker-a-0").mkdir()
    with (tmp_path / "broker-a-0/lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert collect_directory(tmp_path, 0.75, 0.9).locks == {"broker-a-0": os.getpid()}
    assert collect_directory(tmp_path, 0.75, 0.9).locks == {}


def test_readable_files_are_made_private_and_a_missing_directory_is_created(tmp_path: Path, monkeypatch):
    data, token, missing = tmp_path / "data", tmp_path / "token", tmp_path / "not/there"
    (data / "broker-a-0").mkdir(parents=True)
    (data / "broker-a-0/log").write_text("messages")
    (data / "link").symlink_to(token)
    for path, mode in ((data, 0o755), (data / "broker-a-0", 0o755), (data / "broker-a-0/log", 0o644)):
        path.chmod(mode)
    token.write_text("secret")
    token.chmod(0o644)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))

    lines = fix(collect_machine([data, missing], 0.75, 0.9))
    assert lines == [
        f"{token}: mode 0644 is 0600 now",
        f"{data}: other users may no longer use 3 files and directories",
        f"created {missing}, mode 0700",
    ]
    assert list(readable_by_others(data)) == []
    assert missing.stat().st_mode & 0o777 == 0o700
    assert (data / "broker-a-0/log").read_text() == "messages"
    assert fix(collect_machine([data, missing], 0.75, 0.9)) == []


def test_tokens_are_compared_without_being_shown(tmp_path: Path, monkeypatch):
    token = tmp_path / "token"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    assert collect_machine([], 0.75, 0.9).token_digest == ""
    token.write_text("secret\n")
    digest = collect_machine([], 0.75, 0.9).token_digest
    assert len(digest) == 12
    assert "secret" not in repr(collect_machine([], 0.75, 0.9))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert collect_machine([], 0.75, 0.9).token_digest == digest
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    assert collect_machine([], 0.75, 0.9).token_digest != digest


def test_a_second_raymq_on_the_import_path_is_seen(tmp_path: Path, monkeypatch):
    assert len(collect_machine([], 0.75, 0.9).copies["raymq"]) == 1
    (tmp_path / "raymq").mkdir()
    (tmp_path / "raymq/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    copies = collect_machine([], 0.75, 0.9).copies["raymq"]
    assert copies[0] == str(tmp_path.resolve())
    assert len(copies) == 2


def test_the_installed_ray_reports_its_health_checks():
    """The installed Ray reports the settings of its health checks. Ray's class for them is private. If Ray moves the
    class, the check reports that the settings are unknown."""
    assert health_checks() is not None


def progress(topic: str, committed: int | None, least: int, lag_ms: int) -> GroupQueueProgress:
    return GroupQueueProgress("g", MessageQueue(topic, "broker-a", 0), committed, least, 100, lag_ms)


def test_a_groups_slowest_topic_is_the_one_nearest_to_its_retention():
    queues = (progress("short", 50, 0, 1000), progress("long", 50, 0, 9000), progress("kept", 5, 40, 10**12))
    attributes = {
        "short": TopicAttributes(reserve_time_ms=2000),
        "kept": TopicAttributes(cleanup_policy=CleanupPolicy.COMPACTION),
    }
    facts = group_facts(GroupSummary("g", queues, 195, 10**12, 0, 3), attributes, 2, 100_000)
    assert (facts.slowest_topic, facts.lag_ms, facts.retention_ms) == ("short", 1000, 2000)
    assert (facts.lost, facts.dead_letters, facts.members, facts.lag) == (0, 3, 2, 195)


def test_messages_that_were_deleted_before_a_group_read_them_are_counted():
    queues = (progress("t", 30, 40, 0), progress("t", None, 40, 0), progress("t", 60, 40, 0))
    assert group_facts(GroupSummary("g", queues, 0, 0, 0, 0), {}, 0, 1000).lost == 10


def test_a_group_that_has_committed_nothing_has_no_slowest_topic():
    facts = group_facts(GroupSummary("g", (), 0, 0, 0, 0), {}, 0, 1000)
    assert (facts.slowest_topic, facts.retention_ms) == ("", None)


@contextmanager
def serving(body: bytes) -> Iterator[int]:
    """Run an HTTP server on a free port that answers every request with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Suppress the server's log lines."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


METRICS = b"""# TYPE ray_raymq_up gauge
ray_raymq_up{Component="core_worker",name="broker-a",role="broker"} 1.0
ray_raymq_up{role="storage",name="storage-broker-a-0"} 1.0
ray_raymq_up_other{name="not-this"} 1.0
"""


def test_servers_with_fresh_gauges_are_read_from_a_port():
    with serving(METRICS) as port:
        assert collect_port("127.0.0.1", port).servers == {"broker-a", "storage-broker-a-0"}
    assert collect_port("127.0.0.1", port).error


RULES = {"data": {"groups": [{"rules": [{"name": "RaymqNoMaster"}, {"name": "Other"}]}]}}


def test_rules_are_read_from_prometheus():
    with serving(json.dumps(RULES).encode()) as port:
        assert collect_prometheus(f"http://127.0.0.1:{port}/").rules == {"RaymqNoMaster", "Other"}
    with serving(b"<html>") as port:
        assert collect_prometheus(f"http://127.0.0.1:{port}").error


def test_a_prometheus_that_does_not_answer_is_an_error_in_words():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert collect_prometheus(f"http://127.0.0.1:{port}").error == "Prometheus does not answer: Connection refused"


@pytest.mark.parametrize("url", ["localhost:9090", "file:///etc/passwd"])
def test_an_illegal_url_is_an_error_and_is_not_read(url):
    assert "does not begin with http" in collect_prometheus(url).error
