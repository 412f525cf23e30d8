"""Tests of the gateway's actors on a cluster: start, a killed process, several processes at one port, stop."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raymq
from placement.actor_lifecycle import GOES_ON
from placement.gateway.shared_port import shared_port
from placement.status import cluster_status
from raymq.client.cluster.launcher import launch
from raymq.common.config.cluster import load_settings
from raymq.common.errors import ConfigError, ServiceNotAvailableError
from raymq.common.protocol.status import GatewayReport
from raymq.gateway.convert.times import duration
from raymq.gateway.wire import messages as wire
from raymq.gateway.wire.enums import Code
from tests.support.gateway.one_call import call_gateway
from tests.support.history.waiting import eventually
from tests.support.ports import free_port

HOST = "127.0.0.1"


class Launcher:
    """Starts and stops gateways like `raymq gateway`. `folder`: for the settings file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._address = ray.get_runtime_context().gcs_address

    def start(self, text: str) -> list[dict[str, Any]]:
        config = self._folder / "raymq.yaml"
        config.write_text(text)
        found: list[dict[str, Any]] = launch("gateways", self._address, load_settings(config))
        return found

    def stop(self) -> list[str]:
        stopped: list[str] = launch("stop_gateways", self._address)
        return stopped


@pytest.fixture
def launcher(mq: raymq.Client, tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    yield found
    found.stop()


def send(port: int, topic: str, body: bytes) -> None:
    resource = wire.Resource(name=topic)
    sent = wire.Message(topic=resource, body=body, system_properties=wire.SystemProperties(message_id="01A"))
    answer = call_gateway(port, "SendMessage", wire.SendMessageRequest(messages=[sent]))
    assert answer.status.code == Code.OK, answer.status.message


def receive(port: int, topic: str, group: str) -> list[bytes]:
    request = wire.ReceiveMessageRequest(
        group=wire.Resource(name=group),
        message_queue=wire.MessageQueue(topic=wire.Resource(name=topic)),
        batch_size=32,
        invisible_duration=duration(60_000),
        long_polling_timeout=duration(5_000),
    )
    return [one.message.body for one in call_gateway(port, "ReceiveMessage", request) if one.HasField("message")]


def gateways() -> tuple[GatewayReport, ...]:
    return cluster_status().gateways


def test_a_gateway_serves_at_the_same_port_after_its_process_was_killed(mq: raymq.Client, launcher: Launcher) -> None:
    mq.admin.create_topic("gateway-actor", queues=2)
    port = free_port()
    settings = f"gateway: {{port: {port}}}\n"
    [first] = launcher.start(settings)
    assert (first["listens"], first["tls"]) == (f"{HOST}:{port}", False)
    send(port, "gateway-actor", b"1")
    os.kill(first["pid"], signal.SIGKILL)
    eventually(lambda: [one for one in gateways() if one.pid not in (0, first["pid"])], "another process")
    send(port, "gateway-actor", b"2")
    got: list[bytes] = []
    eventually(lambda: got.extend(receive(port, "gateway-actor", "gateway-actor-g")) or len(got) >= 2, "both messages")
    assert sorted(got) == [b"1", b"2"]
    [one] = gateways()
    # a second start changes nothing
    [again] = launcher.start(settings)
    assert again["pid"] == one.pid
    assert launcher.stop() == [one.actor]
    assert gateways() == ()
    with socket.socket() as free:
        # As every server does: connections that the gateway closed keep the port for a minute (TIME_WAIT).
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind((HOST, port))


def answers(port: int) -> bool:
    answer = call_gateway(port, "Heartbeat", wire.HeartbeatRequest(client_type=1))
    return bool(answer.status.code == Code.OK)


def test_processes_of_one_node_share_a_port(launcher: Launcher) -> None:
    port = free_port()
    found = launcher.start(f"gateway: {{port: {port}, processes: 2}}\n")
    assert len({one["pid"] for one in found}) == 2
    assert {one["listens"] for one in found} == {f"{HOST}:{port}"}
    os.kill(found[0]["pid"], signal.SIGKILL)
    # the other process serves, or the restarted one
    assert answers(port)
    eventually(lambda: all(not one.error for one in gateways()), "two processes that serve")


def test_a_first_start_that_fails_leaves_no_gateway(launcher: Launcher) -> None:
    with socket.create_server((HOST, 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ServiceNotAvailableError, match=f"cannot listen at {HOST}:{taken}"):
            launcher.start(f"gateway: {{port: {taken}}}\n")
    assert gateways() == ()
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert"):
        launcher.start(f"gateway: {{port: {free_port()}, tls_cert: /nowhere/chain.pem, tls_key: /nowhere/key.pem}}\n")
    assert gateways() == ()


def test_a_start_with_wrong_settings_keeps_the_gateway_that_serves(launcher: Launcher) -> None:
    port = free_port()
    [former] = launcher.start(f"gateway: {{port: {port}}}\n")
    with socket.create_server((HOST, 0)) as other:
        taken = other.getsockname()[1]
        with pytest.raises(ServiceNotAvailableError, match=f"port {taken}, of this node.*{GOES_ON}"):
            launcher.start(f"gateway: {{port: {taken}}}\n")
    with pytest.raises(ConfigError, match=rf"gateway\.tls_cert.*{GOES_ON}"):
        launcher.start(f"gateway: {{port: {port}, tls_cert: /nowhere/chain.pem, tls_key: /nowhere/key.pem}}\n")
    [one] = gateways()
    assert (one.pid, one.error) == (former["pid"], "")
    assert answers(port)


@pytest.mark.long
def test_a_start_that_fails_after_the_former_gateway_ended_brings_it_back(launcher: Launcher) -> None:
    """The gateway of another cluster on this machine holds the new port, which a running gateway cannot check."""
    port, held = free_port(), free_port()
    [former] = launcher.start(f"gateway: {{port: {port}}}\n")
    with (
        shared_port(held, "another cluster", Path(tempfile.gettempdir())),
        pytest.raises(ConfigError, match=f"port {held} belongs to .* the gateway runs again with its former settings"),
    ):
        launcher.start(f"gateway: {{port: {held}, processes: 2}}\n")
    [one] = gateways()
    assert (one.listens, one.error) == (f"{HOST}:{port}", "")
    assert one.pid != former["pid"]
    assert answers(port)
