"""Tests of a server's authentication: unknown users, wrong signatures, missing rights, sufficient rights and replayed
calls, over actor calls and lanes (direct socket connections)."""

from __future__ import annotations

import ast
import pickle
import secrets
import threading
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from actors.access import authenticated_server as module
from actors.access.authenticated_server import AuthenticatedServer, ServerAccess
from actors.actor_class import actor_class
from actors.core.access.authorizer import Authorizer
from raymq.common import identity
from raymq.common.errors import (
    AccessDeniedError,
    AuthenticationError,
    InvalidArgumentError,
    QuotaExceededError,
    ServiceNotAvailableError,
    SignedTooEarlyError,
)
from raymq.common.identity import Identity
from raymq.common.message import PullStatus
from raymq.common.protocol.store import FetchRequest, FetchResult
from raymq.remoting.access.policies import make_entry
from raymq.remoting.access.requests import rules_of
from raymq.remoting.access.signatures import NONCE_BYTES, Signature, sign
from raymq.remoting.access.stand_in import ActorOwner, OwnerAuthentication, owned_actor
from raymq.remoting.access.state import NO_USERS, AuthState
from raymq.remoting.access.users import INTERNAL_USER, User, UserType, make_user
from raymq.remoting.storage_client import StorageDescription
from tests.support.clients.fakes import description

ALICE, BOB, ADMIN = (Identity(name, name[:1].encode() * 32) for name in ("alice", "bob", "root"))
INTERNAL = Identity(INTERNAL_USER, b"i" * 32)
SERVER = "server-a"
NOW_MS = 1_000_000
LIFE = b"l" * 16
ROOT = Path(__file__).parents[4]
FLOORS = ("raymq", "storage", "actors", "placement", "raydp_jobs")
NO_NAMED_ACTOR = {
    "collect_on_node": "a task",
    "_probe_by_value()": "a task",
    "remote_function(install_board)": "a task",
    "remote_function(internal_key)": "a task",
    "remote_function(_list_stores)": "a task",
    "DelayTotals": "an actor without a name, which no other program can look up",
    "type(base.__name__, (base,), body)": "RayDP's own master, see docs/access.md",
}
"""Objects that the code passes to `ray.remote` although they are not named actors of raymq. Each has its reason as
value."""


@cache
def given_to_ray() -> list[tuple[str, ast.expr]]:
    """Return the expressions that the code passes to `ray.remote`, each with the name of its module. Fails if a module
    uses `ray.remote` as a decorator."""
    found = []
    for path in sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")):
        text = path.read_text()
        if "ray.remote" not in text:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            for decorator in getattr(node, "decorator_list", ()):
                assert not ast.unparse(decorator).startswith("ray.remote"), f"{module}: {ast.unparse(decorator)}"
            if isinstance(node, ast.Call):
                options = node.func.func if isinstance(node.func, ast.Call) else node.func
                if isinstance(options, ast.Attribute) and ast.unparse(options) == "ray.remote" and node.args:
                    found.append((module, node.args[0]))
    return found


def named_actors(maker: str) -> list[type]:
    """Return the classes of the actors that raymq's code creates by a call of the function `maker`."""
    return [
        getattr(import_module(module), ast.unparse(given.args[0]))
        for module, given in given_to_ray()
        if isinstance(given, ast.Call) and ast.unparse(given.func) == maker
    ]


SERVERS = named_actors("actor_class")
OWNED = named_actors("owned_actor")


def users(**quotas: int) -> AuthState:
    """Return users for the tests: ALICE may read and write topic `orders` within `quotas`, BOB has no rights, ADMIN has
    every right."""
    state = NO_USERS.with_user(User(ADMIN.user, ADMIN.key, UserType.SUPER), is_new=True)
    state = state.with_user(User(ALICE.user, ALICE.key, **quotas), is_new=True)
    state = state.with_user(User(BOB.user, BOB.key), is_new=True)
    return state.with_entries(ALICE.user, [make_entry("Topic:orders", ["Pub", "Sub"])], is_new=True)


class NameServerDouble:
    """Fake NameServer with one method for each kind of access rule: a topic rule, a rule for lists, and a rule for
    servers."""

    def __init__(self, name: str = "x") -> None:
        self.calls: list[Any] = []

    def topic_route(self, topic: str, offset: int = 0, *, limit: int = 1) -> tuple[str, int, int]:
        """Stand-in for the method that returns a topic's route. It returns its arguments."""
        self.calls.append((topic, offset, limit))
        return topic, offset, limit

    def topics(self) -> list[str]:
        """Return the names of all topics."""
        return ["orders", "bills"]

    def wipe_write_perm(self) -> str:
        """Stand-in for a method that only servers and super users may call."""
        return "obeyed"


def opened(server: type, real: Any, state: AuthState | None = None) -> Any:
    """Return a stand-in for a server actor that authenticates each call before the call reaches `real`."""
    made: Any = object.__new__(type("Made", (actor_class(server),), {}))
    made._real = real
    access = ServerAccess(SERVER, INTERNAL, users() if state is None else state)
    made._authentication = AuthenticatedServer(access, server.__name__.removesuffix("Double"), lambda: NOW_MS, LIFE)
    return made


@pytest.fixture
def scene() -> Any:
    """Return a NameServer that authenticates its calls, as the actor's class creates it in the actor's process."""
    return opened(NameServerDouble, NameServerDouble())


def call(server: Any, who: Identity, method: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(server, f"signed_{method}")(*signed(who, method, *args, **kwargs))


def signed(who: Identity, method: str, *args: Any, **kwargs: Any) -> tuple[Signature, bytes]:
    payload = pickle.dumps((args, kwargs))
    nonce = secrets.token_bytes(NONCE_BYTES)
    return sign(who.user, who.key, SERVER, method, payload, LIFE, NOW_MS, nonce), payload


def test_a_user_with_the_right_gets_the_methods_result(scene):
    assert call(scene, ALICE, "topic_route", "orders", 7, limit=3) == ("orders", 7, 3)
    assert call(scene, ALICE, "topic_route", topic="orders") == ("orders", 0, 1)


def test_a_call_that_nobody_signed_is_refused(scene):
    with pytest.raises(AuthenticationError, match="needs a user"):
        scene.topic_route("orders")
    for signature in (None, "alice", ALICE):
        with pytest.raises(AuthenticationError):
            scene.signed_topic_route(signature, pickle.dumps((("orders",), {})))
    assert scene._real.calls == []


@pytest.mark.parametrize(
    "who", [Identity("alice", BOB.key), Identity("nobody", b"n" * 32), Identity(INTERNAL_USER, b"x" * 32)]
)
def test_a_wrong_secret_and_an_unknown_user_are_refused(scene, who):
    with pytest.raises(AuthenticationError, match=who.user):
        call(scene, who, "topic_route", "orders")
    assert scene._real.calls == []


def test_arguments_are_not_unpickled_before_the_signature_is_right(scene, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "file"), "w"))

    signature, _ = signed(ALICE, "topic_route", "orders")
    with pytest.raises(AuthenticationError):
        scene.signed_topic_route(signature, pickle.dumps(((Bomb(),), {})))
    assert not (tmp_path / "file").exists()


def test_access_error_names_the_user_the_action_and_the_resource(scene):
    for who, topic in ((BOB, "orders"), (ALICE, "bills")):
        with pytest.raises(AccessDeniedError) as caught:
            call(scene, who, "topic_route", topic)
        assert caught.value.user == who.user
        assert f"on Topic:{topic}" in caught.value.need
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert scene._real.calls == []


def test_a_replayed_signed_call_is_refused(scene):
    heard = signed(ALICE, "topic_route", "orders")
    scene.signed_topic_route(*heard)
    with pytest.raises(AuthenticationError, match="repeat"):
        scene.signed_topic_route(*heard)
    other = signed(ALICE, "topic_route", "orders")
    with pytest.raises(AuthenticationError):
        # the signature was made for the method topic_route, so the method topics refuses it
        scene.signed_topics(*other)
    assert len(scene._real.calls) == 1


def test_a_method_that_no_rule_names_is_for_servers_and_super_users(scene):
    with pytest.raises(AccessDeniedError, match=r"Server:server-a\.wipe_write_perm"):
        call(scene, ALICE, "wipe_write_perm")
    for who in (INTERNAL, ADMIN):
        assert call(scene, who, "wipe_write_perm") == "obeyed"
        assert call(scene, who, "topics") == ["orders", "bills"]


def test_a_list_contains_only_names_that_the_user_may_see(scene):
    assert call(scene, ALICE, "topics") == ["orders"]
    assert call(scene, BOB, "topics") == []


def test_arguments_that_the_method_does_not_take_are_a_type_error(scene):
    with pytest.raises(TypeError):
        call(scene, ALICE, "topic_route", "orders", 1, 2, 3)


def test_decisions_hold_until_users_or_policies_change_and_older_ones_are_not_heeded(scene):
    authorizer, before = scene._authentication.authorizer, scene._authentication.authorizer.state
    call(scene, ALICE, "topic_route", "orders")
    authorizer.know(before.without_entries(ALICE.user))
    with pytest.raises(AccessDeniedError):
        call(scene, ALICE, "topic_route", "orders")
    authorizer.know(before)
    with pytest.raises(AccessDeniedError):
        call(scene, ALICE, "topic_route", "orders")
    authorizer.know(authorizer.state.without_user(ALICE.user))
    with pytest.raises(AuthenticationError):
        call(scene, ALICE, "topic_route", "orders")


def test_the_owners_secret_is_known_by_its_key():
    state = NO_USERS.with_user(make_user("root", "the secret of root", type=UserType.SUPER), is_new=True)
    state = state.with_user(make_user("other", "the other's secret", type=UserType.SUPER), is_new=True)
    authenticated = AuthenticatedServer(ServerAccess(SERVER, INTERNAL, state, owner="root"), "Console")
    tried = ("the secret of root", "the other's secret", "short", "")
    assert [authenticated.is_owners_secret(secret) for secret in tried] == [True, False, False, False]
    assert not AuthenticatedServer(ServerAccess(SERVER, INTERNAL, state), "Console").is_owners_secret(
        "the secret of root"
    )


class Frame:
    """One frame (message of the wire protocol) on a lane, raymq's direct socket connection."""

    def __init__(self, user: str) -> None:
        self.user, self.address = user, "10.0.0.7"


class Batch:
    def __init__(self, topic: str) -> None:
        self.topic, self.records, self.sizes = topic, b"x" * 100, (50, 50)


def test_a_frame_is_guarded_by_the_same_table():
    guard = opened(StorageDouble, None)._authentication.guard
    guard(Frame("alice"), "append", ([Batch("orders")],))
    guard(Frame(INTERNAL_USER), "append_log", ())
    for user, method, arguments in (
        ("bob", "append", ([Batch("orders")],)),
        ("alice", "append", ([Batch("orders"), Batch("bills")],)),
        ("alice", "append_log", ()),
        ("", "describe", ()),
        ("deleted", "append", ([Batch("orders")],)),
    ):
        with pytest.raises(AccessDeniedError):
            guard(Frame(user), method, arguments)


def test_sent_messages_count_against_the_quota_and_the_error_has_the_wait():
    authorizer = Authorizer(SERVER, INTERNAL, rules_of("Storage"), users(messages_per_second=10), LIFE)
    batches = ([Batch("orders")] * 5,)
    authorizer.admit("alice", "", "append", batches, 0.0)
    with pytest.raises(QuotaExceededError, match="messages per second") as caught:
        authorizer.admit("alice", "", "append", batches, 500.0)
    assert caught.value.retry_after_ms == 500
    authorizer.admit("alice", "", "append", batches, 1000.0)


@pytest.mark.parametrize(
    ("server", "method", "arguments"),
    [
        ("Storage", "fetch", ([FetchRequest("orders", 0, 0, 1)], 1000, 0.0)),
        ("Pull", "next_tasks", ("pull-billing-0", "life", 1, 0)),
    ],
)
def test_a_user_over_its_quota_gets_no_messages_over_any_lane(
    server: str, method: str, arguments: tuple[Any, ...]
) -> None:
    state = users(consume_messages_per_second=10)
    state = state.with_entries(ALICE.user, [make_entry("Group:billing", ["Sub"])], is_new=True)
    authorizer = Authorizer(SERVER, INTERNAL, rules_of(server), state, LIFE)
    authorizer.admit("alice", "", method, arguments, 0.0)
    authorizer.meter.consumed("alice", 100, 15, 0.0)
    with pytest.raises(QuotaExceededError, match="consumed messages per second"):
        authorizer.admit("alice", "", method, arguments, 100.0)
    authorizer.admit("alice", "", method, arguments, 5000.0)


class StorageDouble:
    """Fake storage actor that returns the same message of 100 bytes for every read."""

    def __init__(self, name: str = "x") -> None:
        """Create the fake storage actor. `name` is ignored."""

    def fetch(self, requests: list[FetchRequest], max_bytes: int, wait_s: float) -> list[FetchResult]:
        """Return one result for each fetch request. All results contain the same message."""
        return [FetchResult(PullStatus.FOUND, 1, 0, 1, b"x" * 100, 1) for _ in requests]

    def describe(self) -> StorageDescription:
        """Return the storage actor's description."""
        return description()


@pytest.mark.parametrize("bounded", [True, False])
def test_consumed_bytes_count_against_the_quota_and_are_not_read_from_files(bounded: bool) -> None:
    state = users(consume_bytes_per_second=50) if bounded else users()
    storage = opened(StorageDouble, StorageDouble(), state)
    call(storage, ALICE, "fetch", [FetchRequest("orders", 0, 0, 1)], 1000, 0.0)
    if bounded:
        with pytest.raises(QuotaExceededError, match="consumed bytes per second"):
            call(storage, ALICE, "fetch", [FetchRequest("orders", 0, 0, 1)], 1000, 0.0)
    else:
        call(storage, ALICE, "fetch", [FetchRequest("orders", 0, 0, 1)], 1000, 0.0)
    assert call(storage, ALICE, "describe").in_place is not bounded
    assert call(storage, INTERNAL, "describe").in_place


def test_the_decisions_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("actors.core.access.authorizer.DECISIONS_MAX", 10)
    authorizer = Authorizer(SERVER, INTERNAL, rules_of("NameServer"), users(), LIFE)
    for number in range(25):
        authorizer.admit(ADMIN.user, "", "topic_route", (f"t{number}",), 0.0)
    assert len(authorizer._known[1]) <= 10


def test_a_process_with_authentication_acts_as_the_internal_user_and_its_lanes_ask(monkeypatch):
    monkeypatch.setattr(module, "_protected", [])
    assert (module.lane_users(), module.lane_guard(), module.access_for("x")) == (None, None, {})
    access = ServerAccess(SERVER, INTERNAL, users())
    try:
        module.start_authentication(access, "NameServer")
        assert identity.present() == INTERNAL
        assert module.lane_users()(INTERNAL_USER) == INTERNAL.key
        assert module.lane_guard() is not None
        started = module.access_for("pull-1")["access"]
        assert (started.server, started.internal, started.state) == ("pull-1", INTERNAL, access.state)
        assert INTERNAL.key.hex() not in repr(started)
        assert repr(INTERNAL.key) not in repr(started)
    finally:
        identity.give_back(INTERNAL)


def test_every_actor_class_of_the_code_authenticates_its_calls():
    assert {real.__name__ for real in SERVERS} >= {"Broker", "NameServer", "Pull", "Storage", "ConsoleService"}
    assert {real.__name__ for real in OWNED} == {"Listener", "PredicateRunner"}
    others = {ast.unparse(given) for _, given in given_to_ray()}
    others -= {f"actor_class({real.__name__})" for real in SERVERS}
    others -= {f"owned_actor({real.__name__})" for real in OWNED}
    assert others == set(NO_NAMED_ACTOR)


@pytest.mark.parametrize("real", OWNED)
def test_every_method_of_an_actor_with_users_code_serves_its_owner_and_its_pull_actor_only(real):
    made: Any = object.__new__(type("Made", (owned_actor(real),), {}))
    key = b"k" * 32
    made._real, made._authentication = (
        Unreachable(),
        OwnerAuthentication(ActorOwner(SERVER, ALICE, key), lambda: NOW_MS, LIFE),
    )
    names = [name for name in vars(owned_actor(real)) if f"signed_{name}" in vars(owned_actor(real))]
    assert set(names) == {name for name in vars(real) if not name.startswith("_")}
    for name in names:
        with pytest.raises(AuthenticationError):
            getattr(made, name)()
        heard = signed(ALICE, "other")
        for who in (BOB, ADMIN, INTERNAL, Identity("alice", b"wrong"), Identity("nobody", key)):
            with pytest.raises(AuthenticationError):
                call(made, who, name)
        for signature, payload in ((None, b""), heard):
            with pytest.raises(AuthenticationError):
                getattr(made, f"signed_{name}")(signature, payload)
        for who in (ALICE, Identity(INTERNAL_USER, key)):
            with pytest.raises(InvalidArgumentError, match=f"{name} was reached"):
                call(made, who, name)
        again = signed(ALICE, name)
        for error in (InvalidArgumentError, AuthenticationError):
            with pytest.raises(error):
                getattr(made, f"signed_{name}")(*again)


def test_an_actor_that_pull_actors_started_serves_them_only():
    authenticated = OwnerAuthentication(ActorOwner(SERVER, INTERNAL), lambda: NOW_MS, LIFE)
    assert authenticated.authenticate_call("pids", *signed(INTERNAL, "pids"), lambda: 7) == 7
    for who in (ALICE, Identity(INTERNAL_USER, b"x" * 32)):
        with pytest.raises(AuthenticationError):
            authenticated.authenticate_call("pids", *signed(who, "pids"), lambda: 7)


def test_a_call_signed_before_the_start_of_a_users_actor_must_be_signed_again():
    authenticated = OwnerAuthentication(ActorOwner(SERVER, ALICE), lambda: NOW_MS)
    with pytest.raises(SignedTooEarlyError):
        authenticated.authenticate_call("pids", *signed(ALICE, "pids"), lambda: 7)


def test_no_key_of_an_actor_with_users_code_is_shown():
    assert "kkkk" not in repr(ActorOwner(SERVER, Identity("alice", b"k" * 32), b"k" * 32))


@pytest.mark.parametrize("server", SERVERS)
def test_every_method_refuses_unsigned_calls_and_users_without_permission(server):
    made = opened(server, Unreachable())
    names = [name for name in vars(actor_class(server)) if f"signed_{name}" in vars(actor_class(server))]
    assert len(names) > 1
    heard = signed(ALICE, "other")
    for name in names:
        with pytest.raises(AuthenticationError):
            getattr(made, name)()
        for signature, payload in ((None, b""), heard, signed(Identity("alice", b"wrong"), name)):
            with pytest.raises(AuthenticationError):
                getattr(made, f"signed_{name}")(signature, payload)
        if name not in rules_of(server.__name__):
            with pytest.raises(AccessDeniedError):
                getattr(made, f"signed_{name}")(*signed(ALICE, name))


class Unreachable:
    """Fake server whose methods all fail."""

    def __getattr__(self, name: str) -> Any:
        def method() -> None:
            raise InvalidArgumentError(f"{name} was reached")

        return method


def test_newer_users_apply_but_the_super_user_stays_as_in_the_settings():
    state = users()
    authenticated = AuthenticatedServer(
        ServerAccess(SERVER, INTERNAL, state, "broker-a", ADMIN.user), "NameServer", lambda: NOW_MS, LIFE
    )
    newer = state.without_user(BOB.user).with_user(User(ADMIN.user, b"?" * 32, UserType.SUPER), is_new=False)
    authenticated.know(newer.kept_at(NOW_MS))
    assert authenticated.authorizer.key_of(BOB.user) is None
    assert authenticated.authorizer.key_of(ADMIN.user) == ADMIN.key
    authenticated.know(state)
    assert authenticated.authorizer.key_of(BOB.user) is None, "older ones do not"


def test_a_door_asks_for_newer_users_again_and_again_whatever_fails(monkeypatch):
    monkeypatch.setattr(module, "USERS_INTERVAL_S", 0.0)
    authenticated, stopping = (
        AuthenticatedServer(ServerAccess(SERVER, INTERNAL, users()), "NameServer", lambda: NOW_MS, LIFE),
        threading.Event(),
    )
    asked: list[int] = []
    start = users().version

    def ask(version: int) -> AuthState | None:
        asked.append(version)
        if len(asked) in (1, 3):
            raise ServiceNotAvailableError("the broker is away")
        if len(asked) == 4:
            stopping.set()
            return None
        return users().without_user(BOB.user).kept_at(7_000)

    authenticated.follow(ask, stopping)
    assert asked == [start, start, 7_000, 7_000]
    assert authenticated.authorizer.key_of(BOB.user) is None


def test_a_process_without_a_door_has_none():
    assert module.authenticated_server() is None
