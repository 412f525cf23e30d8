"""Tests of the access check of every request of every server. Each request is sent by an unknown user, with a wrong
signature, without rights, with rights, and as a replay.

A request arrives as a signed actor call or as a frame of a lane (direct socket connection). With access control on,
plain methods refuse calls, so no third way exists. The tests take the requests from the servers' classes, and the
necessary rights from the table in raymq.remoting.access.requests. A new method without sample arguments in this module
fails the tests.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from actors.actor_class import actor_class
from raymq.common.errors import AccessDeniedError, AuthenticationError
from raymq.common.identity import SIGNED, Identity
from raymq.remoting.access.policies import Action, Need, make_entry
from raymq.remoting.access.requests import FOR_SERVERS, OVER_LANES_ONLY, RULES
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import User
from tests.support.cases import check_all
from tests.unit.actors.access.test_authenticated_server import (
    ADMIN,
    ALICE,
    BOB,
    INTERNAL,
    SERVERS,
    Frame as LaneFrame,
    call,
    opened,
    signed,
    users,
)

CARL = Identity("carl", b"c" * 32)
"""Test user who receives exactly the rights that a request needs."""


def named(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**values)


BATCH = named(topic="orders", records=b"", sizes=())
INSTANCE = "pull-billing-0"
ARGUMENTS: dict[str, Any] = {
    # Sample arguments by parameter name, for parameters that mean the same in every method.
    "topic": "orders",
    "group": "billing",
    "queues": [("orders", 0)],
    "batches": [BATCH],
    "spans": [("orders", 0, 0, 1)],
    "positions": [("orders", 0, 0)],
    "requests": [named(topic="orders")],
    "end": named(producer_group="billing"),
    "parts": [named(topic="orders")],
    "commits": {"orders": {}},
    "generations": {"orders": {}},
    "queue": named(topic="orders"),
    "question": named(group="billing", kind="running"),
    "config": named(group="billing"),
    "configs": [named(group="billing")],
    "heartbeat": named(consumers=[named(group="billing")]),
    "heartbeats": [("billing", named(topics=["orders"]))],
    "expressions": {"orders": "*"},
    "call": named(
        instance=named(name="pull-billing-0"),
        settings=named(group="billing", subscriptions=[named(topic="orders")]),
    ),
    "name": INSTANCE,
}
OF_METHOD: dict[str, dict[str, Any]] = {
    "Broker.create_topics": {"topics": [named(topic="orders")]},
    "Broker.start_offsets": {"generations": ["orders"]},
    "Broker.take_group_checks": {"groups": ["billing"]},
    "Controller.leader": {"group": "broker-a"},
}
ANSWERS: dict[str, Any] = {
    "Broker.status": {"deleted_unread": [], "topics": [], "groups": []},
    "Broker.topic_offsets": {},
    "Pull.status": {"instances": []},
}
"""Return values of fake actor methods whose results are lists of names. The server under test removes the names that
the user may not see. All other fake methods return empty lists."""

BY_NAME = {server.__name__: server for server in SERVERS}


def requests_of(server: str) -> list[str]:
    """Return the names of a server's requests, such as "Broker.status"."""
    methods = vars(actor_class(BY_NAME[server]))
    return sorted(f"{server}.{name.removeprefix(SIGNED)}" for name in methods if name.startswith(SIGNED))


class Recorder:
    """Stand-in for a real server: it has the server's methods, and records which methods were called."""

    def __init__(self, server: type) -> None:
        self.reached: list[str] = []
        for name, function in inspect.getmembers(server, inspect.isfunction):
            if not name.startswith("_"):
                setattr(self, name, self._method(server.__name__, name, function))

    def _method(self, server: str, name: str, function: Any) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            self.reached.append(name)
            return ANSWERS.get(f"{server}.{name}", [])

        kept = list(inspect.signature(function).parameters.values())[1:]
        method.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return method


class Request:
    """One request under test: the authenticating server, the request's arguments, and the rights that the request
    needs."""

    def __init__(self, title: str) -> None:
        server, self.method = title.split(".")
        self.title, self._class = title, BY_NAME[server]
        parameters = list(inspect.signature(getattr(self._class, self.method)).parameters.values())[1:]
        own = OF_METHOD.get(title, {})
        self.arguments: list[Any] = [
            own.get(one.name, ARGUMENTS.get(one.name, ["orders"] if one.name == "topics" else None))
            for one in parameters
            if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        self.keywords = {one.name: None for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
        self.for_servers = title in FOR_SERVERS
        self.needs: Sequence[Need] = () if self.for_servers else RULES[title].needed(self.arguments)

    def server(self, state: AuthState | None = None) -> Any:
        return opened(self._class, Recorder(self._class), state)

    def by_call(self, server: Any, who: Identity) -> None:
        call(server, who, self.method, *self.arguments, **self.keywords)

    def by_lane(self, server: Any, who: Identity) -> None:
        server._authentication.guard(LaneFrame(who.user), self.method, self.arguments)

    def state(self, needs: Sequence[Need], which: int = 0) -> AuthState:
        """Return an access state in which the user CARL has exactly the rights in `needs`. If a need accepts any one of
        several actions, CARL gets the action with the index `which`."""
        state = users().with_user(User(CARL.user, CARL.key), is_new=True)
        allowed: dict[str, list[str]] = {}
        for need in needs:
            action = need.actions[which % len(need.actions)]
            allowed.setdefault(str(need.resource), []).append(action.value)
        entries = [make_entry(resource, actions) for resource, actions in allowed.items()]
        return state.with_entries(CARL.user, entries, is_new=True) if entries else state


def with_every_request(check: Callable[[Request], None]) -> Callable[[str], None]:
    """Turn `check` into a test with one case per server. The test calls `check` for each of the server's requests, and
    reports all failures together."""

    @pytest.mark.parametrize("server", sorted(BY_NAME))
    def of_server(server: str) -> None:
        check_all(requests_of(server), lambda title: check(Request(title)))

    return of_server


def test_the_table_lists_every_request() -> None:
    assert {title for server in BY_NAME for title in requests_of(server)} == (
        RULES.keys() | FOR_SERVERS
    ) - OVER_LANES_ONLY
    open_to_all = {title for title in RULES.keys() - OVER_LANES_ONLY if not Request(title).needs}
    assert "Storage.fetch" not in open_to_all
    assert "Broker.describe" in open_to_all


@with_every_request
def test_nobody_gets_in(request_: Request) -> None:
    server = request_.server()
    with pytest.raises(AuthenticationError):
        getattr(server, request_.method)(*request_.arguments)
    for signature in (None, "carl", CARL):
        with pytest.raises(AuthenticationError):
            getattr(server, SIGNED + request_.method)(signature, pickle.dumps((request_.arguments, {})))
    with pytest.raises(AccessDeniedError):
        request_.by_lane(server, Identity("", b""))
    assert server._real.reached == []


@with_every_request
def test_a_wrong_signature_gets_nobody_in(request_: Request) -> None:
    server = request_.server()
    for who in (
        Identity(ALICE.user, BOB.key),
        Identity(ADMIN.user, b"?" * 32),
        Identity(INTERNAL.user, b"?" * 32),
        Identity("stranger", b"s" * 32),
    ):
        with pytest.raises(AuthenticationError):
            request_.by_call(server, who)
        # The server checks the handshake of a lane (direct socket connection) with the key of the user whom the client
        # names.
        assert server._authentication.authorizer.key_of(who.user) != who.key
    with pytest.raises(AccessDeniedError):
        request_.by_lane(server, Identity("stranger", b"s" * 32))
    # Send a valid signature of ADMIN with a call for which it was not made. The first signature was made for other
    # arguments, the second for another method.
    signature, _ = signed(ADMIN, request_.method, "other")
    other, payload = signed(ADMIN, "other", *request_.arguments)
    for pair in ((signature, payload), (other, payload)):
        with pytest.raises(AuthenticationError):
            getattr(server, SIGNED + request_.method)(*pair)
    assert server._real.reached == []


@with_every_request
def test_without_permission_a_request_is_refused(request_: Request) -> None:
    if not (request_.needs or request_.for_servers):
        # This request needs no permission. Its reply contains no names, or only the names that the user may see.
        request_.by_call(request_.server(), BOB)
        return
    server = request_.server()
    for way in (request_.by_call, request_.by_lane):
        with pytest.raises(AccessDeniedError) as caught:
            way(server, BOB)
        assert caught.value.user == BOB.user
    # in each round, the user lacks exactly one of the permissions that the request needs
    for missing in range(len(request_.needs)):
        others = [need for number, need in enumerate(request_.needs) if number != missing]
        server = request_.server(request_.state(others))
        for way in (request_.by_call, request_.by_lane):
            with pytest.raises(AccessDeniedError):
                way(server, CARL)
        assert server._real.reached == []


@with_every_request
def test_with_permission_a_request_is_carried_out(request_: Request) -> None:
    if request_.for_servers:
        server = request_.server()
        for who in (ADMIN, INTERNAL):
            request_.by_call(server, who)
            request_.by_lane(server, who)
        assert server._real.reached == [request_.method] * 2
        return
    ways = max((len(need.actions) for need in request_.needs), default=1)
    for which in range(ways):
        server = request_.server(request_.state(request_.needs, which))
        request_.by_call(server, CARL)
        request_.by_lane(server, CARL)
        assert server._real.reached == [request_.method]


@with_every_request
def test_a_replay_is_refused(request_: Request) -> None:
    server = request_.server()
    heard = signed(ADMIN, request_.method, *request_.arguments, **request_.keywords)
    getattr(server, SIGNED + request_.method)(*heard)
    with pytest.raises(AuthenticationError, match="repeat"):
        getattr(server, SIGNED + request_.method)(*heard)
    for name in [other for other in vars(type(server)) if other.startswith(SIGNED)][:20]:
        with pytest.raises(AuthenticationError):
            getattr(server, name)(*heard)
    assert server._real.reached == [request_.method]


def test_all_actions_of_policies_are_used_by_some_request() -> None:
    used = {
        action for title in RULES.keys() - OVER_LANES_ONLY for need in Request(title).needs for action in need.actions
    }
    assert used == set(Action) - {Action.ALL, Action.ANY}
