"""Tests of the broker's methods for managing users. They run before and after the first change, and with access control
off."""

from __future__ import annotations

from typing import Any

import pytest

from actors.access import authenticated_server as server_module
from actors.access.authenticated_server import AuthenticatedServer, ServerAccess
from actors.broker.live.users import UserMethods
from actors.broker.state_log import StateLog
from raymq.common.errors import InvalidArgumentError
from raymq.common.identity import Identity
from raymq.remoting.access.changes import CreateUser, DeleteUser, UpdateUser
from raymq.remoting.access.state import NO_USERS
from raymq.remoting.access.users import INTERNAL_USER, User, UserType
from tests.unit.actors.broker.test_state_log import Sender, Store

ROOT = User("root", b"r" * 32, UserType.SUPER)
START = NO_USERS.with_user(ROOT, is_new=True).with_user(User("team", b"t" * 32), is_new=True)


class Users(UserMethods):
    def __init__(self) -> None:
        store = Store("storage-broker-a-0")
        self._log = StateLog("broker-a", store, Sender(store))  # type: ignore[arg-type]  # a fake
        self._log.load()

    def _change(self, decide: Any) -> bool:
        return self._log.change(decide)

    def close(self) -> None:
        self._log.close()


@pytest.fixture
def broker():
    users = Users()
    yield users
    users.close()


@pytest.fixture
def authenticated(monkeypatch):
    access = ServerAccess("broker-a", Identity(INTERNAL_USER, b"i" * 32), START, "broker-a", "root")
    authenticated = AuthenticatedServer(access, "Broker", lambda: 1)
    monkeypatch.setattr(server_module, "_protected", [authenticated])
    return authenticated


def test_users_come_from_the_start_until_the_first_change(broker, authenticated):
    assert [user.name for user in broker.users()] == ["root", "team"]
    assert broker.auth_state(0) is None
    broker.change_access(CreateUser(User("new", b"n" * 32)))
    assert [user.name for user in broker.users()] == ["new", "root", "team"]
    state = broker.auth_state(START.version)
    assert state.users.keys() == {"new", "root", "team"}
    assert broker.auth_state(state.version) is None
    assert authenticated.authorizer.key_of("new") == b"n" * 32
    broker.change_access(DeleteUser("team"))
    assert authenticated.authorizer.key_of("team") is None


def test_the_settings_own_user_is_changed_in_the_settings(broker, authenticated):
    for change in (UpdateUser("root", b"x" * 32), DeleteUser("root")):
        with pytest.raises(InvalidArgumentError, match=r"raymq\.yaml"):
            broker.change_access(change)
    assert broker.auth_state(0) is None


def test_where_access_is_off_there_are_no_users(broker):
    with pytest.raises(InvalidArgumentError, match="access is off"):
        broker.users()
    with pytest.raises(InvalidArgumentError, match="access is off"):
        broker.change_access(DeleteUser("team"))
