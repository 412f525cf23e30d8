"""Tests of a gateway with TLS and users, with RocketMQ's official clients for Python and Node."""

from __future__ import annotations

import operator
import shutil
import ssl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.gateway.wire.enums import Code
from raymq.remoting.access.users import derive_key, gateway_secret
from tests.support.clusters.cluster import Sandbox, embedded
from tests.support.gateway.gateways import HOST, RunningGateway, make_gateway_certificate, running_gateway
from tests.support.gateway.official import InstallError, or_skip
from tests.support.gateway.official_client import OfficialClient, OfficialError, official_client
from tests.support.gateway.official_place import ARRIVES_S, LANGUAGES
from tests.support.history.waiting import eventually

pytestmark = [
    pytest.mark.timeout(900),  # The first run installs the clients.
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificate"),
]

SENT_BETWEEN = 20
ANSWER_S = 60.0
ADMIN = raymq.Credentials("admin", "the secret of admin")
TEAM = raymq.Credentials("team", "the secret of team")
USERS = f"""
users:
  - name: {TEAM.user}
    secret: {TEAM.secret}
    policies:
      - {{resource: "Topic:orders", actions: [Pub, Sub]}}
      - {{resource: "Group:billing-*", actions: [Sub]}}
"""


@contextmanager
def access_enabled(box: Sandbox, files: Path) -> Iterator[str]:
    """Yield the settings of a cluster with users, as the super user."""
    for name, text in (("secret", ADMIN.secret), ("users", USERS)):
        (files / name).write_text(text)
        (files / name).chmod(0o600)
    settings = (
        f"broker_groups: 1\ndata_dir: {box.data}\n"
        f"access: {{enable: true, super_secret_file: {files}/secret, users_file: {files}/users}}\n"
    )
    (box.work / "raymq.yaml").write_text(settings)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAYMQ_USER", ADMIN.user)
        environment.setenv("RAYMQ_SECRET", ADMIN.secret)
        yield settings


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_gateway_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def gateway(
    box: Sandbox, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    files, (chain, key) = tmp_path_factory.mktemp("access"), certificate
    with access_enabled(box, files) as settings, embedded(box) as client:
        for topic in ("orders", "secrets"):
            client.admin.create_topic(topic, queues=2)
        with running_gateway(files, f", tls_cert: {chain}, tls_key: {key}", settings) as gateway:
            yield gateway


@contextmanager
def trusting(certificates: Path, language: str, folder: Path) -> Iterator[OfficialClient]:
    """Start a client that trusts the servers with a certificate in the file `certificates`."""
    with ExitStack() as stack:
        trusted = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificates)}
        try:
            client = stack.enter_context(official_client(language, folder, trusted))
        except InstallError as error:
            or_skip(error)
        yield client


@pytest.fixture(params=LANGUAGES)
def client(
    gateway: RunningGateway, certificate: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[OfficialClient]:
    with trusting(certificate[0], request.param, tmp_path / request.param) as client:
        yield client


def team_secret() -> str:
    """Return the secret with which clients of the user TEAM sign their calls."""
    return gateway_secret(derive_key(TEAM.user, TEAM.secret))


def test_only_a_user_with_the_right_secret_and_right_sends_and_receives(
    client: OfficialClient, gateway: RunningGateway
) -> None:
    secret = team_secret()
    place = {"endpoints": gateway.endpoints, "tls": True}
    for name, credentials in {
        "team": [TEAM.user, secret],
        "wrong": [TEAM.user, f"{secret}x"],
        "none": ["", ""],
    }.items():
        # a producer without topics asks for no route when it starts
        client.call("open_producer", name=name, topics=[], credentials=credentials, **place)

    def code(request: str, **arguments: Any) -> int | None:
        with pytest.raises(OfficialError) as failure:
            client.call(request, **arguments)
        return failure.value.code

    def sends(name: str, topic: str) -> dict[str, Any]:
        return {"name": name, "messages": [{"topic": topic, "body": "17"}]}

    # the Python client asks for a route before it sends, and writes the code of this refusal to its log only
    is_python = client.language == "python"
    [sent] = client.call("send", **sends("team", "orders"))
    assert code("send", **sends("wrong", "orders")) == (None if is_python else Code.UNAUTHORIZED)
    assert code("send", **sends("none", "orders")) == (None if is_python else Code.UNAUTHORIZED)
    assert code("send", **sends("team", "secrets")) == (None if is_python else Code.FORBIDDEN)
    fields = {"topic": "orders", "credentials": [TEAM.user, secret], **place}
    client.call("open_simple", name="simple", group=f"billing-{client.language}", **fields)

    def arrives() -> bool:
        return sent["id"] in [one["id"] for one in client.call("receive", name="simple")]

    eventually(arrives, "the message")
    other = {"name": "other", "group": "other-team", **fields}
    # a Node consumer waits at its start for an answer to its settings, a Python consumer does not
    if is_python:
        client.call("open_simple", **other)
        assert code("receive", name="other") == Code.FORBIDDEN
    else:
        assert code("open_simple", **other) == Code.FORBIDDEN


def test_a_renewed_certificate_serves_new_connections_and_no_send_fails(
    gateway: RunningGateway, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """Clients send all the time. The clients that start afterwards trust the new certificate only."""
    fields: dict[str, Any] = {"topics": ["orders"], "endpoints": gateway.endpoints, "tls": True}
    fields["credentials"] = [TEAM.user, team_secret()]
    renewed, trusted, serving = make_gateway_certificate(tmp_path), tmp_path / "trusted.pem", gateway.pid()
    former, new = certificate[0].read_text(), renewed[0].read_text()
    trusted.write_text(former + new)
    with ExitStack() as stack:
        senders = [stack.enter_context(trusting(trusted, one, tmp_path / one)) for one in LANGUAGES]
        for sender in senders:
            sender.call("open_producer", name="load", **fields)
            sender.call("start_load", name="load", topic="orders", prefix=f"load-{sender.language}", pause_s=0.05)
        more_sent(senders)
        replace(certificate[1], renewed[1])
        # the new key does not belong to the former certificate
        assert served_certificate(gateway) == ssl.PEM_cert_to_DER_cert(former)
        more_sent(senders)
        replace(certificate[0], renewed[0])
        assert served_certificate(gateway) == ssl.PEM_cert_to_DER_cert(new)
        late = [stack.enter_context(trusting(renewed[0], one, tmp_path / f"late-{one}")) for one in LANGUAGES]
        for client in late:
            client.call("open_producer", name="late", **fields)
            client.call("send", name="late", messages=[{"topic": "orders", "body": f"late-{client.language}"}])
        more_sent(senders)
        loads = [sender.call("end_load", name="load") for sender in senders]
        assert [(load["ended"], load["failed"]) for load in loads] == [(True, [])] * len(loads)
        missing = {body for load in loads for body, *_ in load["sent"]} | {f"late-{one}" for one in LANGUAGES}
        del fields["topics"]
        late[0].call("open_simple", name="all", group="billing-renewed", topic="orders", **fields)

        def all_received() -> bool:
            missing.difference_update(one["body"] for one in late[0].call("receive", name="all"))
            return not missing

        eventually(all_received, "all messages", ARRIVES_S)
    assert gateway.pid() == serving


def more_sent(senders: Sequence[OfficialClient]) -> None:
    """Wait until the load of each client has sent SENT_BETWEEN further messages."""

    def counts() -> list[int]:
        return [sender.call("load_counts", name="load")[0] for sender in senders]

    wanted = [count + SENT_BETWEEN for count in counts()]
    eventually(lambda: all(map(operator.ge, counts(), wanted)), "further sends", ARRIVES_S)


def replace(file: Path, new: Path) -> None:
    """Replace a file at once with a copy of another one."""
    copy = file.with_suffix(".new")
    shutil.copy(new, copy)
    copy.replace(file)


def served_certificate(gateway: RunningGateway) -> bytes:
    """Return the certificate (DER) that the gateway shows to a new connection."""
    port = int(gateway.endpoints.rpartition(":")[2])
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((HOST, port), timeout=ANSWER_S))
