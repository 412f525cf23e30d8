"""Tests of a gateway with TLS and users, with RocketMQ's official clients for Python and Node."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.gateway.wire.enums import Code
from raymq.remoting.access.users import derive_key, gateway_secret
from tests.support.clusters.cluster import Sandbox, embedded
from tests.support.gateway.gateways import RunningGateway, make_gateway_certificate, running_gateway
from tests.support.gateway.official import InstallError, or_skip
from tests.support.gateway.official_client import OfficialClient, OfficialError, official_client
from tests.support.history.waiting import eventually

pytestmark = [
    pytest.mark.timeout(900),  # The first run installs the clients.
    pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificate"),
]

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


@pytest.fixture(params=["python", "node"])
def client(
    gateway: RunningGateway, certificate: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[OfficialClient]:
    trusted = {"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate[0])}
    try:
        with official_client(request.param, tmp_path / request.param, trusted) as client:
            yield client
    except InstallError as error:
        or_skip(error)


def test_only_a_user_with_the_right_secret_and_right_sends_and_receives(
    client: OfficialClient, gateway: RunningGateway
) -> None:
    secret = gateway_secret(derive_key(TEAM.user, TEAM.secret))
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
