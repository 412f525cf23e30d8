"""The methods of the Broker actor for users and policies: changing and reading them while raymq runs.

The first broker group keeps them, as one record in its state log, so they survive restarts and failovers. Before the
first change they are the initial ones (the settings' super user and access.users_file). All authenticated servers
(actors.access.authenticated_server) ask for them. Every broker has these methods, but only the first group's broker
accepts calls.
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
    """The part of the Broker for users and policies; the actor inherits its methods. Thread-safe."""

    _log: StateLog

    @abstractmethod
    def _change(self, decide: Callable[[BrokerState], DecidedChanges]) -> bool:
        """Carry out a change of the state; durable on return."""

    def auth_state(self, version: int) -> AuthState | None:
        """Return the users and policies if they are newer than `version`, with keys, for raymq's own servers; else
        None.

        Also returns None if nothing was changed since raymq was started.
        """
        state = self._log.ready().access
        return state if state is not None and state.version > version else None

    def users(self) -> list[UserDescription]:
        """Return all users with their policies, sorted by name, without keys. InvalidArgumentError: access is off."""
        return describe_users(self._present(_server()))

    def change_access(self, change: AccessChange) -> None:
        """Change a user or its policies. Durable on return, in force here, and in force on all servers within seconds.

        InvalidArgumentError: access is off, the user is the settings' own, or the change is not possible.
        UserNotExistError, PolicyNotExistError.
        """
        server = _server()
        if changed_user(change) == server.access.owner:
            raise InvalidArgumentError(
                f"{server.access.owner} is the super user of raymq.yaml: change access.super_user or "
                "access.super_secret_file there, and start raymq again"
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
