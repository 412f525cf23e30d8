"""The methods of the Broker actor for users and policies, which change and read them while raymq runs.

The first broker group stores users and policies as one record in its state log, so they survive restarts and failovers.
Before the first change the initial users and policies apply (the settings' super user and access.users_file). All
authenticated servers (actors.access.authenticated_server) poll for changes. Every broker has these methods, but only
the broker of the first group accepts calls.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from actors.access.authenticated_server import AuthenticatedServer, authenticated_server
from actors.broker.state_log import DecidedChanges, StateLog
from actors.core.broker.state import BrokerState
from raymq.common.errors import InvalidArgumentError
from raymq.remoting.access.changes import AccessChange, UserDescription, changed_user, describe_users
from raymq.remoting.access.state import AuthState


class UserMethods(ABC):
    """The Broker's methods for users and policies; the Broker actor inherits from this class. Thread-safe."""

    _log: StateLog

    @abstractmethod
    def _change(self, decide: Callable[[BrokerState], DecidedChanges]) -> bool:
        """Apply a change to the broker's state; durable on return."""

    def auth_state(self, version: int) -> AuthState | None:
        """Return the users and policies, including keys, if they are newer than `version`; else None. Only raymq's own
        servers call this method.

        Also returns None if no user or policy was ever changed in this raymq.
        """
        state = self._log.ready().access
        return state if state is not None and state.version > version else None

    def users(self) -> list[UserDescription]:
        """Return all users with their policies but without their secret keys, sorted by name. Raises
        InvalidArgumentError if access control is off."""
        return describe_users(self._present(_server()))

    def change_access(self, change: AccessChange) -> None:
        """Change a user or a user's policies. On return the change is durable and in force on this broker; all servers
        apply it within seconds.

        Raises InvalidArgumentError if access is off, if the user is the settings' super user, or if the change is
        invalid. Raises UserNotExistError or PolicyNotExistError if the user or the policy does not exist.
        """
        server = _server()
        if changed_user(change) == server.access.owner:
            raise InvalidArgumentError(
                f"user {server.access.owner!r} is the super user in raymq.yaml: change access.super_user or "
                "access.super_secret_file in this file, and start raymq again"
            )
        now_ms = time.time_ns() // 1_000_000
        self._change(lambda state: state.decide_access(server.access.state, change, now_ms))
        server.know(self._present(server))

    def _present(self, server: AuthenticatedServer) -> AuthState:
        return server.with_owner(self._log.ready().access or server.access.state)


def _server() -> AuthenticatedServer:
    server = authenticated_server()
    if server is None:
        raise InvalidArgumentError("access is off, so there are no users: set access.enable in raymq.yaml")
    return server
