"""Tests of how `raymq doctor` asks gateways, and of its checks of gateways. The gateways are gRPC servers of this
process."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from raymq.common.config.gateway import GatewayOptions
from raymq.common.names import WEBHOOK_GROUP
from raymq.common.protocol.status import ClusterStatus
from raymq.gateway.wire.enums import Code
from raymq.gateway.wire.messages import QueryRouteRequest, QueryRouteResponse, Resource, Status
from raymq.tools.doctor.checks.gateway_checks import GATEWAY_CHECKS
from raymq.tools.doctor.collect.gateways import (
    QUERY_ROUTE,
    collect_gateways,
    gateway_port_error,
    route_request,
    status_code,
)
from raymq.tools.doctor.facts import ClusterFacts, DoctorSnapshot, GatewayFacts, GroupFacts, MachineFacts
from raymq.tools.doctor.findings import Finding, State, run_checks
from tests.support.clients.lanes import make_certificates

HOST = "127.0.0.1"
HERE = "10.0.0.1"
SNAPSHOT = DoctorSnapshot(MachineFacts("box", "3.11.7", "2.60.0", "0.1.0"), cluster=ClusterFacts(ClusterStatus()))
DAY_S = 86_400


@contextmanager
def served(code: int, credentials: Any = None) -> Iterator[int]:
    """Serve QueryRoute with a status code, and yield the port."""

    def answer(data: bytes, context: Any) -> bytes:
        request = QueryRouteRequest.FromString(data)
        assert request.topic == Resource(name="orders")
        return QueryRouteResponse(status=Status(code=code, message="as asked")).SerializeToString()

    service, _, name = QUERY_ROUTE.lstrip("/").partition("/")
    with ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {name: handler})])
        place = f"{HOST}:0"
        port = server.add_insecure_port(place) if credentials is None else server.add_secure_port(place, credentials)
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


def asked(
    listens: str,
    *,
    tls: bool = False,
    node: str = HERE,
    topics: tuple[str, ...] = ("orders",),
    webhook_error: str = "",
) -> GatewayFacts:
    report = {
        "brokers": [{"actor": "broker-a", "error": "", "topics": ["%RETRY%g", *topics]}],
        "gateways": [
            {
                "actor": "gateway-a-0",
                "error": "",
                "node": node,
                "listens": listens,
                "tls": tls,
                "webhook_error": webhook_error,
            },
            {"actor": "gateway-a-1", "error": "does not answer"},
        ],
    }
    [found] = collect_gateways(ClusterStatus.of(report), HERE)
    return found


def findings(**changes: Any) -> dict[str, Finding]:
    return {one.check: one for one in run_checks(GATEWAY_CHECKS, replace(SNAPSHOT, **changes))}


def test_the_request_and_the_answer_have_the_bytes_of_the_protocol() -> None:
    for topic in ("t", "orders", "x" * 126, "x" * 127, "x" * 128, "x" * 255):
        assert QueryRouteRequest.FromString(route_request(topic)) == QueryRouteRequest(topic=Resource(name=topic))
    for code in Code:
        assert status_code(QueryRouteResponse(status=Status(code=code)).SerializeToString()) == code
    assert [status_code(data) for data in (b"", b"\x0a", b"\x0a\x00", b"\x12\x00")] == [0, 0, 0, 0]


@pytest.mark.parametrize("code", [Code.OK, Code.UNAUTHORIZED])
def test_a_gateway_that_answers_passes(code: Code) -> None:
    with served(code) as port:
        facts = asked(f"{HOST}:{port}")
        assert facts == GatewayFacts("gateway-a-0", f"{HOST}:{port}")
        # without a topic, there is no question
        assert asked(f"{HOST}:{port}", topics=()) == facts
    found = findings(gateways=(facts,))
    assert {one.state for one in found.values()} == {State.OK}


def test_a_gateway_that_answers_with_an_error_or_not_at_all_fails() -> None:
    with served(Code.HA_NOT_AVAILABLE) as port:
        facts = asked(f"{HOST}:{port}")
    assert facts.error == "the route of topic orders has the status 50002"
    gone = asked(f"{HOST}:{port}")
    assert "UNAVAILABLE" in gone.error
    # a closed port cannot begin TLS either
    assert asked(f"{HOST}:{port}", tls=True).error.startswith("no connection")
    found = findings(gateways=(gone,))["gateways answer"]
    assert (found.state, found.where) == (State.FAIL, "gateway-a-0")


def test_a_gateway_that_only_another_machine_reaches_is_not_asked() -> None:
    facts = asked(f"{HOST}:1", node="10.0.0.2")
    assert not facts.asked
    assert "0 of 1 gateways were asked" in findings(gateways=(facts,))["gateways answer"].seen


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")
def test_the_end_of_a_certificate_is_read_from_the_gateway(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    pair = (Path(files.key).read_bytes(), Path(files.certificate).read_bytes())
    with served(Code.OK, grpc.ssl_server_credentials([pair])) as port:
        facts = asked(f"{HOST}:{port}", tls=True)
    assert facts.error == ""
    assert facts.certificate_ends_s is not None
    assert DAY_S < facts.certificate_ends_s - time.time() <= 2 * DAY_S
    found = findings(gateways=(facts,))["gateway certificates"]
    assert (found.state, found.where) == (State.WARN, "gateway-a-0")


@pytest.mark.parametrize(("days", "state"), [(-0.01, State.FAIL), (13.9, State.WARN), (14.1, State.OK)])
def test_a_certificate_near_its_end_is_named(days: float, state: State) -> None:
    facts = GatewayFacts("gateway-a-0", f"{HOST}:8081", certificate_ends_s=time.time() + days * DAY_S)
    assert findings(gateways=(facts,))["gateway certificates"].state is state


def test_web_hooks_that_cannot_be_signed_or_wait_long_are_named() -> None:
    def judged(lag: int, minutes: int, *gateways: GatewayFacts) -> Finding:
        group = GroupFacts(WEBHOOK_GROUP, lag, minutes * 60_000, slowest_topic="images-results")
        other = GroupFacts("billing", 5, 99 * 60_000, slowest_topic="orders")
        cluster = ClusterFacts(ClusterStatus(), groups=(group, other))
        return findings(cluster=cluster, gateways=gateways)["web hooks"]

    serves = GatewayFacts("gateway-a-0", f"{HOST}:8081")
    assert judged(0, 99, serves).state is State.OK
    assert judged(3, 10, serves).state is State.OK
    waits = judged(3, 11, serves)
    assert (waits.state, waits.where) == (State.WARN, WEBHOOK_GROUP)
    assert "images-results waits for 11 min" in waits.seen
    assert "the log of the gateways" in waits.do
    assert "raymq gateway start" in judged(3, 11).do
    wrong = judged(0, 0, replace(serves, webhook_error="the key file cannot be read"))
    assert (wrong.state, wrong.where, wrong.seen) == (State.FAIL, "gateway-a-0", "the key file cannot be read")


def test_the_error_of_a_gateways_key_is_collected() -> None:
    assert asked(f"{HOST}:1", node="10.0.0.2", webhook_error="no key").webhook_error == "no key"


def test_a_used_port_matters_only_if_a_gateway_shall_start_on_it() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        error = gateway_port_error(GatewayOptions(enable=True, port=port))
        with socket.create_server((HOST, 0)) as another:
            free = another.getsockname()[1]
        assert gateway_port_error(GatewayOptions(enable=True, port=free, http_port=port)) == error
        assert error == f"{HOST}:{port}: Address already in use"
        assert gateway_port_error(GatewayOptions(port=port)) == ""
        running = ClusterStatus.of({"gateways": [{"actor": "gateway-a-0", "error": ""}]}).gateways
        assert gateway_port_error(GatewayOptions(enable=True, port=port), running) == ""
    assert gateway_port_error(GatewayOptions(enable=True, port=port)) == ""
    found = findings(gateway_port_error=error)["gateway port"]
    assert (found.state, found.where) == (State.FAIL, "here")
    assert f"{HOST}:{port}" in found.seen
