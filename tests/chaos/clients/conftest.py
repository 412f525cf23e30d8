"""The official clients and the gateway that the tests of one module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import raymq
from tests.support.gateway.gateways import RunningGateway, running_gateway
from tests.support.gateway.official import InstallError, or_skip
from tests.support.gateway.official_client import OfficialClient, official_client
from tests.support.gateway.official_place import LANGUAGES, Place


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], OfficialClient]]:
    """Return a function that returns the client of a language. It starts the client at the first call."""
    running: dict[str, OfficialClient] = {}
    home: Path = tmp_path_factory.mktemp("official")
    with ExitStack() as stack:

        def client(language: str) -> OfficialClient:
            if language not in running:
                try:
                    running[language] = stack.enter_context(official_client(language, home / language))
                except InstallError as error:
                    or_skip(error)
            return running[language]

        yield client


@pytest.fixture(scope="module")
def gateway(mq: raymq.Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """Run a gateway on the cluster of the module."""
    with running_gateway(tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@pytest.fixture(params=LANGUAGES)
def place(
    mq: raymq.Client,
    gateway: RunningGateway,
    clients: Callable[[str], OfficialClient],
    request: pytest.FixtureRequest,
) -> Place:
    """Return the topics and groups of one test, with the official client of a language."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")
    return Place(mq, clients(request.param), gateway.endpoints, name)
