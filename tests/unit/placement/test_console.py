"""Tests of the cluster view that the web console shows, of the console's settings on a node, and of the order in which
actors stop."""

from __future__ import annotations

import socket
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from placement.actor_lifecycle import _stop_rank
from placement.console import actor
from placement.console.actor import application_settings
from placement.console.cluster_view import settings_of, topics_to_look_at, view_of, writable_of
from raymq.common.config.cluster import ClusterSettings, load_settings
from raymq.common.config.console import ConsoleOptions
from raymq.common.errors import ConfigError, RaymqError, RequestTimeoutError, ServiceNotAvailableError
from raymq.common.names import CONSOLE
from raymq.common.protocol.route import PERM_ALL, PERM_READ, BrokerData, QueueData, TopicRoute
from raymq.common.protocol.status import ClusterStatus, Problem
from raymq.tools.console.security.tokens import LONG_TOKEN_CHARACTERS
from raymq.tools.doctor.checks.status_checks import problems_of


def store(name: str, **changes: Any) -> dict[str, Any]:
    entry = {
        "actor": f"storage-{name}-0", "error": "", "root": f"/d/{name}-0", "queues": 4, "min_physical_offset": 100,
        "max_physical_offset": 1100, "flushed_physical_offset": 1000, "index_behind_bytes": 7, "recovered": "clean",
        "retention": {"disk_ratio": 0.5, "disk_free_bytes": 9000}, "writable": True, "not_writable_reason": "",
    }  # fmt: skip
    return {**entry, **changes}


def report(**changes: Any) -> ClusterStatus:
    whole: dict[str, Any] = {
        "actors": ["broker-a", "console", "nameserver-0", "storage-broker-a-0"],
        "brokers": [{"actor": "broker-a", "broker": "broker-a", "error": "", "ready": True, "topics": ["t"],
                     "groups": ["g", "h"]}],
        "stores": [store("broker-a")],
        "rebalances": [], "pulls": [], "groups": [], "instances": [], "replication": [],
        "consoles": [{"actor": "console", "error": ""}],
        "gateways": [{"actor": "gateway-3f9a-0", "error": "", "node": "10.0.0.1", "clients": {"JAVA": 2, "PHP": 1}}],
    }  # fmt: skip
    found = ClusterStatus.of({**whole, **changes})
    problems = tuple(Problem(one.check, one.state.value, one.seen, one.do, one.where) for one in problems_of(found))
    return replace(found, problems=problems)


def test_a_cluster_without_replicas_is_led_by_its_only_store() -> None:
    view = view_of(report(), "raymq", {"10.0.0.1": False}, {}, {})
    [broker] = view.brokers
    assert (broker.name, broker.ready, broker.master, broker.topics, broker.groups) == (
        *("broker-a", True, "storage-broker-a-0"),
        *(1, 2),
    )
    [one] = view.status.stores
    assert (one.broker_name, one.log_bytes, one.unflushed_bytes) == ("broker-a", 1000, 100)
    assert (one.disk_used, one.disk_free_bytes) == (0.5, 9000)
    assert [server.kind for server in view.servers] == ["NameServer", "Console", "Gateway"]
    assert (view.servers[-1].state, view.servers[-1].node) == ("3 clients", "10.0.0.1")
    assert view.problems == []


def test_replicas_are_shown_with_their_lag_and_the_reason_of_their_group() -> None:
    replica = {"replica": 1, "role": "slave", "node": "10.0.0.2", "lag_bytes": 5, "lag_s": 0.1, "error": "", "note": ""}
    group = {"broker": "broker-a", "master": None, "epoch": 3, "in_sync": [1], "reason": "nobody leads"}
    controller = {"actor": "controller", "error": "", "groups": [{**group, "replicas": [replica]}]}
    view = view_of(report(replication=[controller]), "raymq", {}, {"broker-a": False}, {})
    [broker] = view.brokers
    assert (broker.master, broker.epoch, broker.reason, broker.writable) == (None, 3, "nobody leads", False)
    assert [(one.actor, one.in_sync, one.lag_bytes) for one in broker.replicas] == [("storage-broker-a-1", True, 5)]
    assert view.problems == ["broker-a: nobody leads; start the nodes with its replicas; `raymq status` shows them"]


def test_a_server_that_does_not_answer_is_a_problem_and_a_row() -> None:
    broken = report(
        brokers=[{"actor": "broker-a", "error": "no answer in 5 s"}],
        stores=[{"actor": "storage-broker-a-0", "error": "the actor is dead"}],
    )
    view = view_of(broken, "raymq", {}, {}, {})
    assert view.problems == [
        f"{name}: does not answer: {error}; see the log of {name} in Ray's session; Ray restarts it"
        for name, error in (("broker-a", "no answer in 5 s"), ("storage-broker-a-0", "the actor is dead"))
    ]
    assert view.brokers[0].reason == "no answer in 5 s"
    assert view.status.stores[0].problem == "the actor is dead"


def test_a_full_disk_is_a_problem() -> None:
    full = report(stores=[store("broker-a", writable=False, not_writable_reason="the disk is full")])
    assert view_of(full, "raymq", {}, {}, {}).problems == [
        "storage-broker-a-0: takes no messages: the disk is full; make room on the disk, or see the store's log"
    ]


def test_a_replica_that_follows_is_no_problem_although_it_takes_no_messages() -> None:
    slave = store("broker-a", writable=False, not_writable_reason="", role="SLAVE")
    assert view_of(report(stores=[slave]), "raymq", {}, {}, {}).problems == []


def test_problems_of_a_closed_store_and_a_damaged_log_name_place_and_remedy() -> None:
    closed = {"actor": "storage-broker-a-1", "error": "cannot open /data/broker-a-1: EIO", "closed": True}
    holed = store("broker-a", holes=[{"offset": 1000, "size": 443, "reason": "the body does not match"}])
    replicas = [{"replica": index, "role": "", "node": f"10.0.0.{index}", "lag_bytes": 0, "lag_s": 0.0, "error": "",
                 "note": ""} for index in range(2)]  # fmt: skip
    group = {"broker": "broker-a", "master": 0, "epoch": 3, "in_sync": [0], "reason": "", "replicas": replicas}
    controller = {"actor": "controller", "error": "", "groups": [group]}
    found = view_of(report(stores=[holed, closed], replication=[controller]), "raymq", {}, {}, {}).problems
    assert [problem.partition(": ")[0] for problem in found] == ["storage-broker-a-1", "storage-broker-a-0"]
    assert "the store is closed: cannot open /data/broker-a-1: EIO" in found[0]
    assert "raymq drain 10.0.0.1" in found[0]
    assert "443 damaged bytes at 1000 of its log: the body does not match; check the disk" in found[1]


def test_a_broker_group_is_writable_if_a_topic_of_it_is() -> None:
    def route(topic: str, perm: int) -> TopicRoute:
        return TopicRoute(
            topic,
            {"broker-a": BrokerData("c", "broker-a", {0: "storage-broker-a-0"})},
            (QueueData("broker-a", 1, 1, perm),),
        )

    known = report()
    assert topics_to_look_at(known) == ["t"]
    assert writable_of(known, [route("t", PERM_READ)]) == {"broker-a": False}
    assert writable_of(known, [route("t", PERM_READ), route("u", PERM_ALL)]) == {"broker-a": True}
    assert writable_of(known, []) == {"broker-a": True}


def test_shown_settings_come_from_the_servers() -> None:
    assert settings_of(report(), None) == {"broker_groups": "1", "replication.replicas": "1"}
    store: Any = SimpleNamespace(max_message_size_bytes=5, commit_log_file_size=6, consume_queue_file_size=7)
    controller = {
        "actor": "controller",
        "error": "",
        "groups": [{"broker": "broker-a", "replicas": [{"replica": index} for index in range(3)]}],
    }
    assert settings_of(report(replication=[controller]), store) == {
        "broker_groups": "1",
        "replication.replicas": "3",
        "store.max_message_size_bytes": "5",
        "store.mapped_file_size_commit_log_bytes": "6",
        "store.mapped_file_size_consume_queue_bytes": "7",
    }


def test_without_tokens_only_loopback_may_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "cluster_has_tokens", lambda: False)
    assert application_settings(ConsoleOptions()).open_to_all
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        application_settings(ConsoleOptions(host="0.0.0.0"))
    monkeypatch.setattr(actor, "cluster_has_tokens", lambda: True)
    assert not application_settings(ConsoleOptions(host="0.0.0.0")).open_to_all


def test_with_access_on_the_super_users_secret_is_an_admins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "cluster_has_tokens", lambda: False)
    authenticated = SimpleNamespace(is_owners_secret=lambda secret: secret == "the secret of root")
    monkeypatch.setattr(actor, "authenticated_server", lambda: authenticated)
    settings = application_settings(ConsoleOptions(host="0.0.0.0"))
    assert not settings.open_to_all
    assert [settings.guarded(given) for given in ("the secret of root", "the secret of team", "")] == ["admin", "", ""]
    assert not settings.is_admin("the secret of root"), "it can be guessed, so guesses are bounded"


def test_the_viewers_token_is_read_on_the_node(tmp_path: Path) -> None:
    token = tmp_path / "viewers"
    with pytest.raises(ConfigError, match="cannot read the token"):
        application_settings(ConsoleOptions(viewer_token_file=token))
    token.write_text("look\n")
    short = application_settings(ConsoleOptions(viewer_token_file=token))
    assert (short.viewer_token, short.guarded("look"), short.guarded("wrong")) == (None, "viewer", "")
    token.write_text("a" * LONG_TOKEN_CHARACTERS)
    long = application_settings(ConsoleOptions(viewer_token_file=token))
    assert (long.viewer_token, long.guarded("a" * LONG_TOKEN_CHARACTERS)) == ("a" * LONG_TOKEN_CHARACTERS, "")


@pytest.mark.parametrize(
    "values", [{"port": 70_000}, {"base_path": "raymq/"}, {"tls_cert": "/c"}, {"hosts": "x"}, {"tail_rate": 0}]
)
def test_wrong_settings_are_refused(tmp_path: Path, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="console"):
        load_settings(None, data_dir=tmp_path, console=values)


def test_the_console_is_off_unless_it_is_asked_for_and_ends_first() -> None:
    assert not ClusterSettings().console.enable
    names = ["storage-broker-a-0", "broker-a", "pull-1", "console", "rebalance-0"]
    assert sorted(names, key=_stop_rank)[0] == "console"
    assert sorted(names, key=_stop_rank)[-1] == "storage-broker-a-0"


@pytest.mark.parametrize("failing", ["connect", "create_app", "ConsoleServer"])
def test_a_console_that_cannot_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    closed: list[str] = []
    client = SimpleNamespace(close=lambda: closed.append("client"))

    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise ConfigError(f"{failing} failed")

    monkeypatch.setattr(actor, "application_settings", lambda options: None)
    monkeypatch.setattr(actor, "session_folder", lambda: None)
    monkeypatch.setattr(
        actor.ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=False)
    )
    monkeypatch.setattr(actor, "listen", lambda *arguments, **keywords: listening)
    monkeypatch.setattr(actor, "connect", lambda: client)
    monkeypatch.setattr(actor, "live_cluster", lambda *arguments: None)
    monkeypatch.setattr(actor, "create_app", lambda *arguments: None)
    monkeypatch.setattr(actor, failing, fail)
    service = actor.ConsoleService(ConsoleOptions(), "raymq")
    raised = []
    for _ in range(3):
        with pytest.raises(ConfigError, match=f"{failing} failed") as found:
            service.describe()
        raised.append(found.value)
    assert len(set(map(id, raised))) == 3
    assert len({len(traceback.extract_tb(error.__traceback__)) for error in raised}) == 1
    assert listening.fileno() == -1
    assert closed == ([] if failing == "connect" else ["client"])
    service.close()


class Consoles:
    """Ray's actor `console`, with a process that may have failed to start. `steps`: what start_console did."""

    def __init__(self, options: ConsoleOptions, failure: RaymqError | None) -> None:
        self.options, self.failure = options, failure
        self.steps: list[str] = ["running"]
        self.refused: RaymqError | None = None
        """The error of the check of new settings."""
        self.wrong_port = 0
        """A port with which no console can start. The check of settings does not find it."""

    def end(self, name: str) -> None:
        self.steps.append("ended")

    def start(self, options: ConsoleOptions, cluster_name: str, **access: Any) -> None:
        if self.steps[-1] == "ended":
            self.steps.append("started")
            self.options, self.failure = options, None

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method == "settings":
            return self.options
        if method == "check":
            if self.refused is not None:
                raise self.refused
            return None
        if self.options.port == self.wrong_port:
            raise ConfigError("the port is used")
        if self.failure is not None:
            raise self.failure
        return {"url": "http://127.0.0.1:8270/"}


@pytest.mark.parametrize(
    ("port", "failure", "steps"),
    [
        (8270, None, ["running"]),
        (8271, None, ["running", "ended", "started"]),
        (8270, ServiceNotAvailableError("no NameServer answers"), ["running", "ended", "started"]),
        (8270, RequestTimeoutError("console", 60.0), ["running", "ended", "started"]),
    ],
    ids=["serves", "other settings", "failed start", "no answer"],
)
def test_a_start_replaces_a_console_that_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, port: int, failure: RaymqError | None, steps: list[str]
) -> None:
    consoles = fake_consoles(monkeypatch, ConsoleOptions(port=port), failure)
    assert actor.start_console(ConsoleOptions(), "raymq") == {"url": "http://127.0.0.1:8270/"}
    assert consoles.steps == steps


def fake_consoles(
    monkeypatch: pytest.MonkeyPatch, options: ConsoleOptions, failure: RaymqError | None = None
) -> Consoles:
    consoles = Consoles(options, failure)
    monkeypatch.setattr(actor, "running", lambda: [CONSOLE])
    monkeypatch.setattr(actor, "head_node_id", lambda: "0" * 56)
    monkeypatch.setattr(actor, "end_actor", consoles.end)
    monkeypatch.setattr(actor, "access_for", lambda name: {})
    monkeypatch.setattr(actor, "ActorRef", lambda name: SimpleNamespace(call=consoles.call))
    made = SimpleNamespace(options=lambda **options: SimpleNamespace(remote=consoles.start))
    monkeypatch.setattr(actor, "ConsoleActor", made)
    return consoles


def test_wrong_settings_are_refused_before_a_console_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    consoles = fake_consoles(monkeypatch, ConsoleOptions(port=8271))
    consoles.refused = ConfigError("no such token file")
    with pytest.raises(ConfigError, match="no such token file; nothing was changed"):
        actor.start_console(ConsoleOptions(), "raymq")
    assert consoles.steps == ["running"]


def test_a_console_that_does_not_start_with_new_settings_gets_its_former_settings_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consoles = fake_consoles(monkeypatch, ConsoleOptions(port=8271))
    consoles.wrong_port = 8270
    with pytest.raises(ConfigError, match="the port is used; the console runs again with its former settings"):
        actor.start_console(ConsoleOptions(), "raymq")
    assert consoles.steps == ["running", "ended", "started", "ended", "started"]
    assert consoles.options.port == 8271


def test_a_running_console_checks_the_port_and_the_certificate_of_other_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    service = object.__new__(actor.ConsoleService)
    with socket.create_server(("127.0.0.1", 0)) as other:
        service._port = other.getsockname()[1]
        # the port that the console itself holds is free for the next one
        service.check(ConsoleOptions(port=service._port))
        service._port += 1
        with pytest.raises(ServiceNotAvailableError, match=r"see console\.host and console\.port"):
            service.check(ConsoleOptions(port=other.getsockname()[1]))
    key = tmp_path / "key.pem"
    key.write_text("no key")
    with pytest.raises(ConfigError, match=r"cannot use console\.tls_cert"):
        service.check(ConsoleOptions(port=0, tls_cert=key, tls_key=key))
