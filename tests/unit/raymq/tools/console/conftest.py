"""Fixtures: a web console for an in-memory cluster, and an admin and a viewer who are logged in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.console.asgi_client import AsgiClient
from tests.support.console.fake_cluster import FakeCluster
from tests.support.console.logged_in import VIEWER_TOKEN, console_app, logged_in


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def app(cluster: FakeCluster) -> Any:
    return console_app(cluster)


@pytest.fixture
def admin(app: Any) -> Iterator[AsgiClient]:
    client = logged_in(app)
    yield client
    client.close()


@pytest.fixture
def viewer(app: Any) -> Iterator[AsgiClient]:
    client = logged_in(app, VIEWER_TOKEN, name="Vic")
    yield client
    client.close()


@pytest.fixture
def stranger(app: Any) -> Iterator[AsgiClient]:
    client = AsgiClient(app)
    yield client
    client.close()
