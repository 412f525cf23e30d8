"""Tests of a gateway's process: it serves, it starts again after each failure, and it stops in order. The cluster is a
fake."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from placement.gateway import actor as module
from placement.gateway.actor import Gateway
from raymq.common.config.gateway import GatewayOptions, GatewaySettings
from raymq.common.config.metrics import MetricsOptions, MetricsSettings
from raymq.common.errors import ConfigError, RaymqError, ServiceNotAvailableError
from raymq.common.names import GatewayName
from raymq.gateway.front.server import GrpcFront
from raymq.gateway.service.service import GatewayService
from raymq.gateway.wire.enums import ClientType, Code, Language
from raymq.gateway.wire.messages import HeartbeatRequest
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import User, UserType, gateway_secret, make_user
from tests.support.gateway.gateway_client import ANSWER_S, HOST, METADATA
from tests.support.gateway.one_call import Headers, call_gateway, signed_headers
from tests.support.history.waiting import eventually
from tests.support.ports import free_port


class FakeCluster:
    """A client of raymq, and what a gateway makes of it. `events`: what was opened and closed, in order."""

    routes = names = admin = None

    def __init__(self) -> None:
        self.events: list[str] = []
        self.failures: list[Exception] = []
        """The errors of the next connections, the first one first."""

    def connect(self, *, namespace: str) -> FakeCluster:
        assert namespace == ""
        if self.failures:
            raise self.failures.pop(0)
        self.events.append("connected")
        return self

    @asynccontextmanager
    async def async_producer(self, group: str, send_timeout_s: float) -> AsyncIterator[object]:
        try:
            yield self
        finally:
            self.events.append("producer closed")

    def close(self) -> None:
        self.events.append("client closed")


class FakeGatewayCluster:
    """The cluster of a gateway's service."""

    max_body_bytes = 1 << 20
    producer = transactions = announcer = queues = None

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster

    async def refresh_limits(self) -> None:
        self._cluster.events.append("limits read")

    async def finish(self) -> None:
        self._cluster.events.append("calls finished")

    def close(self) -> None:
        self._cluster.events.append("cluster closed")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCluster:
    found = FakeCluster()
    # the files of the locks on shared ports
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(module, "connect", found.connect)
    monkeypatch.setattr(module, "cluster_of", lambda client, producer, send_timeout_s: FakeGatewayCluster(client))
    monkeypatch.setattr(module, "GATEWAY_RETRY_S", 0.05)
    monkeypatch.setattr(module, "COUNT_INTERVAL_S", 0.05)
    return found


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def started() -> Iterator[Any]:
    gateways: list[Gateway] = []

    def start(port: int, index: int = 0, **options: Any) -> Gateway:
        settings = GatewaySettings(
            GatewayName("3f9a" * 14, index),
            "10.0.0.1",
            GatewayOptions(port=port, **options),
            MetricsSettings(options=MetricsOptions(enable=False)),
        )
        gateways.append(Gateway(settings))
        return gateways[-1]

    yield start
    for gateway in gateways:
        gateway.close()


def heartbeat(port: int, metadata: Headers = METADATA) -> int:
    """Send a heartbeat to the gateway at a port, and return the code of the answer."""
    code: int = call_gateway(port, "Heartbeat", HeartbeatRequest(client_type=ClientType.PRODUCER), metadata).status.code
    return code


def failure(gateway: Gateway) -> RaymqError | None:
    try:
        gateway.status()
    except RaymqError as error:
        return error
    return None


def test_a_gateway_with_a_wrong_key_of_web_hooks_shows_the_error(
    cluster: FakeCluster, port: int, started: Any, tmp_path: Path
) -> None:
    key = tmp_path / "hook-key"
    key.write_text("short")
    options = {"http_port": free_port(), "webhook_hosts": ("hooks.example.org",), "webhook_secret": key}
    gateway = started(port, **options)
    eventually(lambda: isinstance(failure(gateway), ConfigError), "the error of the key")
    assert "gateway.webhook_secret" in str(failure(gateway))
    assert "client closed" in cluster.events


def test_the_status_has_the_error_of_a_key_that_can_no_longer_be_read(
    cluster: FakeCluster, port: int, started: Any
) -> None:
    gateway = started(port)
    assert gateway.describe()["webhook_error"] == ""
    gateway._webhooks = SimpleNamespace(key_error=lambda: "the key cannot be read")
    assert gateway.status()["webhook_error"] == "the key cannot be read"


def test_a_gateway_serves_and_ends_its_receives_and_its_server_first(
    cluster: FakeCluster, port: int, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_receives, stop = GatewayService.end_receives, GrpcFront.stop

    def ending(service: GatewayService) -> None:
        cluster.events.append("receives ended")
        end_receives(service)

    async def stopping(front: GrpcFront) -> None:
        cluster.events.append("server stops")
        await stop(front)

    monkeypatch.setattr(GatewayService, "end_receives", ending)
    monkeypatch.setattr(GrpcFront, "stop", stopping)
    gateway = started(port)
    described = gateway.describe()
    assert (described["node"], described["listens"], described["tls"]) == ("10.0.0.1", f"{HOST}:{port}", False)
    assert heartbeat(port) == Code.OK
    gateway._service.clients.active("client-2", 0.0, client_type=ClientType.PRODUCER, group="", language=Language.JAVA)
    gateway._service.clients.active("client-3", 0.0, client_type=ClientType.PRODUCER, group="", language=77)
    gateway._service.clients.stream_opened("client-2")
    status = gateway.status()
    assert status["clients"] == {"LANGUAGE_UNSPECIFIED": 1, "JAVA": 1, "77": 1}
    assert status["streams"] == 1
    gateway.close()
    first, *ended = (event for event in cluster.events if event != "limits read")
    assert first == "connected"
    assert ended[:3] == ["receives ended", "server stops", "calls finished"]
    assert ended[3:] == ["cluster closed", "producer closed", "client closed"]
    with socket.socket() as free:
        # As every server does: connections that the gateway closed keep the port for a minute (TIME_WAIT).
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((HOST, port))
    with pytest.raises(ServiceNotAvailableError, match="stopping"):
        gateway.status()
    gateway.close()


def test_a_gateway_whose_port_is_used_says_so_and_serves_once_the_port_is_free(
    cluster: FakeCluster, started: Any
) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        port = other.getsockname()[1]
        gateway = started(port)
        with pytest.raises(ServiceNotAvailableError, match=rf"cannot listen at {HOST}:{port}"):
            gateway.describe()
        assert cluster.events[:2] == ["connected", "calls finished"]
        assert cluster.events[2:5] == ["cluster closed", "producer closed", "client closed"]
    eventually(lambda: failure(gateway) is None, "a gateway that serves")
    assert heartbeat(port) == Code.OK


def test_a_gateway_tries_again_after_any_error(cluster: FakeCluster, port: int, started: Any) -> None:
    cluster.failures += [ServiceNotAvailableError("no broker"), KeyError("a fault")]
    gateway = started(port)
    eventually(lambda: failure(gateway) is None, "a gateway that serves")
    assert cluster.failures == []


def test_a_gateway_starts_again_if_nobody_renews_leases(
    cluster: FakeCluster, port: int, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, failures = GatewayService.run, [RuntimeError("a fault")]

    async def failing(service: GatewayService) -> None:
        if failures:
            raise failures.pop()
        await run(service)

    monkeypatch.setattr(GatewayService, "run", failing)
    gateway = started(port)
    eventually(lambda: cluster.events.count("connected") == 2, "the second start")
    eventually(lambda: failure(gateway) is None, "a gateway that serves")
    assert heartbeat(port) == Code.OK


def healthy(http_port: int) -> bool:
    """Return whether a gateway answers HTTP at a port."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{http_port}/healthz", timeout=ANSWER_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_processes_of_one_node_share_their_ports(cluster: FakeCluster, port: int, started: Any) -> None:
    http_port = free_port()
    first, second = (started(port, index, processes=2, http_port=http_port) for index in range(2))
    assert first.describe()["listens"] == second.describe()["listens"]
    assert first.describe()["http"] == f"{HOST}:{http_port}"
    assert healthy(http_port)
    first.close()
    assert heartbeat(port) == Code.OK
    assert healthy(http_port)
    second.close()
    assert not healthy(http_port)
    for number in (port, http_port):
        # a closed connection may keep its port for a while: create_server may share it
        with socket.create_server((HOST, number)):
            pass


def test_a_gateway_whose_http_port_is_used_serves_nobody_until_the_port_is_free(
    cluster: FakeCluster, port: int, started: Any
) -> None:
    with socket.socket() as other:
        other.bind((HOST, 0))
        other.listen()
        http_port = other.getsockname()[1]
        gateway = started(port, http_port=http_port)
        with pytest.raises(ServiceNotAvailableError, match=r"see gateway\.host and gateway\.http_port"):
            gateway.describe()
    eventually(lambda: failure(gateway) is None, "a gateway that serves")
    assert healthy(http_port)


class FakeServer:
    """The access control of a process: its users, which may do everything."""

    def __init__(self, *users: User) -> None:
        self.authorizer = self
        self.state = AuthState({user.name: user for user in users}, {}, 1)


def test_a_gateway_with_access_control_requires_users_and_counts_the_processes(
    cluster: FakeCluster, port: int, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = make_user("shop", "a long secret", type=UserType.SUPER)
    names: list[Any] = [ConnectionError("Ray's head is away"), ["broker-a", "gateway-1-0", "gateway-2-0"]]

    def running() -> list[str]:
        if isinstance(names[0], Exception):
            raise names.pop(0)
        found: list[str] = names[0]
        return found

    monkeypatch.setattr(module, "authenticated_server", lambda: FakeServer(shop))
    monkeypatch.setattr(module, "running", running)
    gateway = started(port)
    gateway.describe()
    assert heartbeat(port) == Code.UNAUTHORIZED
    assert heartbeat(port, signed_headers("shop", gateway_secret(shop.key))) == Code.OK
    eventually(lambda: gateway._processes == 2, "two counted gateway processes")


def test_a_gateway_with_access_control_for_other_machines_needs_tls(
    cluster: FakeCluster, port: int, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "authenticated_server", FakeServer)
    with pytest.raises(ConfigError, match=r"set gateway\.tls_cert and gateway\.tls_key"):
        started(port, host="0.0.0.0", insecure=True).describe()
    assert cluster.events == []


def test_a_gateway_checks_other_settings_on_its_node_and_goes_on(
    cluster: FakeCluster, port: int, started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = started(port)
    gateway.describe()
    current = gateway.settings()

    def check(**options: Any) -> None:
        gateway.check(replace(current, options=GatewayOptions(**{"port": port, **options})))

    # its own port, and a free one
    check(processes=2)
    check(port=free_port(), http_port=free_port())
    key = tmp_path / "key"
    key.write_text("short")
    with pytest.raises(ConfigError, match="cannot use the certificate"):
        check(tls_cert=key, tls_key=key)
    with pytest.raises(ConfigError, match=r"gateway\.webhook_secret"):
        check(http_port=free_port(), webhook_hosts=("hooks.example.org",), webhook_secret=tmp_path / "missing")
    # an address of documentation, which no machine has
    with pytest.raises(ServiceNotAvailableError, match=r"nothing can listen at host 203\.0\.113\.1"):
        check(host="203.0.113.1", insecure=True)
    with socket.create_server((HOST, 0)) as other:
        used = other.getsockname()[1]
        for options, setting in (({"port": used}, "gateway.port"), ({"http_port": used}, "gateway.http_port")):
            with pytest.raises(ServiceNotAvailableError, match=f"see gateway.host and {setting}"):
                check(**options)
    monkeypatch.setattr(module, "authenticated_server", FakeServer)
    with pytest.raises(ConfigError, match=r"set gateway\.tls_cert and gateway\.tls_key"):
        check(host="0.0.0.0", insecure=True)
    assert heartbeat(port) == Code.OK
