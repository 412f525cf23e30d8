"""Makes console applications for tests that need no browser, and clients that are logged in to a console."""

from __future__ import annotations

from typing import Any

from raymq.tools.console.app import create_app
from raymq.tools.console.cluster import ConsoleCluster
from raymq.tools.console.settings import ConsoleSettings
from tests.support.console.asgi_client import AsgiClient
from tests.support.console.fake_cluster import FakeCluster

ADMIN_TOKEN, VIEWER_TOKEN = "the admins' token", "the viewers' token"


def console_app(cluster: FakeCluster | ConsoleCluster, **settings: Any) -> Any:
    """Return the console application of a fake cluster in memory."""
    known = {"is_admin": lambda token: token == ADMIN_TOKEN, "viewer_token": VIEWER_TOKEN}
    if isinstance(cluster, FakeCluster):
        cluster = cluster.console_cluster()
    return create_app(cluster, ConsoleSettings(**{**known, **settings}))


def logged_in(app: Any, token: str = ADMIN_TOKEN, *, base_path: str = "", name: str = "Ada") -> AsgiClient:
    """Log in to the console `app`, and return the client that has the session."""
    client = AsgiClient(app)
    answer = client.post(f"{base_path}/login", {"token": token, "name": name})
    assert answer.status == 303, answer.text
    return client
