"""The access control of a server process. If access is on, every actor call and every request on a lane (direct socket
connection) is checked.

A stand-in class (actors.actor_class) calls `start_authentication` before it makes the real server. From then on the
process acts as raymq's internal user in its own calls. Its lanes require users, and the authorizer checks each frame
(`lane_users`, `lane_guard`). A method can only be called through its signed variant. The signed variant first checks
the signature and then unpickles the arguments. Then the authorizer decides whether the user may make the call
(actors.core.access.authorizer). If the result is a list, it is reduced to the entries that the user may see
(actors.core.access.shown).

This access control keeps raymq users away from each other's topics. It does not protect against clients that may submit
any work to Ray: Ray itself unpickles the arguments of an actor call, and the holder of Ray's token may run code.

Servers that this server starts get the same access settings from `access_for`. The first broker group stores changes of
users and policies in its log. Every authenticated server polls this group for changes. Nothing else survives the
process. If access is off, none of these objects exist.
"""

from __future__ import annotations

import hmac
import inspect
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, NoReturn

from actors.core.access.authorizer import Authorizer
from actors.core.access.meter import HANDED_OUT, Consumption, ReadLimit
from actors.core.access.shown import VisibleNames, cut
from raymq.common import identity
from raymq.common.errors import AuthenticationError, SignedTooEarlyError
from raymq.common.identity import Identity
from raymq.remoting.access.decide import VISIBLE
from raymq.remoting.access.policies import Need, group_resource, topic_resource
from raymq.remoting.access.requests import rules_of
from raymq.remoting.access.signatures import Signature
from raymq.remoting.access.state import NO_USERS, AuthState
from raymq.remoting.access.users import SECRET_MIN_CHARACTERS, derive_key
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.lane.calls import Guard
from raymq.remoting.lane.connection import LaneRequest, Users

USERS_INTERVAL_S: Final = 2.0
"""Interval, in seconds, at which each server polls the broker for changes of users and policies."""
USERS_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The access settings that a server is started with. They are pickled with the server's arguments, and never
    displayed.

    `server`: the actor's name. `internal`: the user as whom raymq's own actors sign their calls. `state`: the initial
    users and policies. `home`: the broker group that stores changes of users and policies; empty if they never change.
    `owner`: the super user of the settings, whose secret and rights always come from the settings.
    """

    server: str
    internal: Identity
    state: AuthState = field(default=NO_USERS, repr=False)
    home: str = ""
    owner: str = ""


class AuthenticatedServer:
    """The access control of one server of the class `server_class`. Thread-safe.

    `clock` returns the time in ms and never goes back. `life`: the id of this process incarnation; if it is None, an id
    is generated.
    """

    def __init__(
        self,
        access: ServerAccess,
        server_class: str,
        clock: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        life: bytes | None = None,
    ) -> None:
        self.access, self._server, self._class, self._clock = access, access.server, server_class, clock
        self.authorizer = Authorizer(access.server, access.internal, rules_of(server_class), access.state, life)

    def know(self, state: AuthState) -> None:
        """Replace the current users and policies with `state`, if `state` is newer."""
        self.authorizer.know(self.with_owner(state))

    def with_owner(self, state: AuthState) -> AuthState:
        """Return `state` with the super user replaced by the super user of the settings."""
        return state.with_owner(self.access.state.users.get(self.access.owner))

    def follow(self, ask: Callable[[int], AuthState | None], stopping: threading.Event) -> None:
        """Poll for newer users and policies at intervals, until `stopping` is set.

        Logs only the first of several failures in a row. While polling fails, the current users and policies apply.
        """
        failed = False
        while not stopping.is_set():
            try:
                state = ask(self.authorizer.state.version)
                if state is not None:
                    self.know(state)
                failed = False
            # catch all errors, so that this polling thread goes on: without polling, a deleted user would keep access
            except Exception as error:
                if not failed:
                    logger.info("%s cannot read changes of users, retrying: %s", self._server, error)
                failed = True
            stopping.wait(USERS_INTERVAL_S)

    def is_owners_secret(self, secret: str) -> bool:
        """Return True if `secret` is the secret of the super user in the settings. Takes about 30 ms for any
        secret."""
        owner = self.access.state.users.get(self.access.owner)
        if owner is None or len(secret) < SECRET_MIN_CHARACTERS:
            return False
        return hmac.compare_digest(owner.key, derive_key(owner.name, secret))

    def refuse_unsigned(self, method: str) -> NoReturn:
        """Reject an unsigned call: always raises AuthenticationError."""
        raise AuthenticationError(
            f"the call {method} of {self._server} needs a user: pass credentials to raymq.connect, or set "
            "RAYMQ_USER and RAYMQ_SECRET"
        )

    def authenticate_call(self, name: str, signature: Any, payload: bytes, method: Callable[..., Any]) -> Any:
        """Execute a signed call of `method`, called `name`, and return the part of the result that the calling user may
        see.

        Raises AuthenticationError if the named user did not sign the call, or if the call was executed before. Raises
        SignedTooEarlyError if the client must sign the call again for this process. Raises AccessDeniedError and
        QuotaExceededError as `Authorizer.admit` does. If an error of this kind is raised, `method` was not called.
        """
        if not isinstance(signature, Signature) or not isinstance(payload, bytes):
            self.refuse_unsigned(name)
        try:
            user = self.authorizer.user_of(signature, name, payload, self._clock())
        except SignedTooEarlyError:
            # Raise SignedTooEarlyError without a warning in the log, because each client gets this error for its first
            # call to this process.
            raise
        except AuthenticationError as error:
            logger.warning("the call %s.%s is refused: %s", self._server, name, error)
            raise
        # unpickle only after the signature check: unpickling an unchecked payload could run code
        args, kwargs = pickle.loads(payload)
        if user == self.access.internal.user:
            return method(*args, **kwargs)
        self.authorizer.admit(user, "", name, _in_order(method, args, kwargs), time.monotonic() * 1000)
        answer = method(*args, **kwargs)
        weigh = HANDED_OUT.get(name)
        if weigh is not None and self.portion(user) is not None:
            self.consumed(user, *weigh(answer))
        return cut(self._class, name, answer, self._visible_to(user))

    def guard(self, request: LaneRequest, method: str, arguments: Sequence[Any]) -> None:
        """Raise an error unless the user who sent `request` over a lane (direct socket connection) is allowed to call
        `method` with these arguments (raymq.remoting.lane.calls.Guard)."""
        self.authorizer.admit(request.user, request.address, method, arguments, time.monotonic() * 1000)

    def portion(self, user: str) -> ReadLimit | None:
        """Return the limit of how much one request of a user may read; None if there is no limit
        (actors.core.access.meter.Consumption)."""
        return self.authorizer.meter.portion(user)

    def consumed(self, user: str, size_bytes: int, messages: int) -> None:
        """Count the messages that a user receives (actors.core.access.meter.Consumption)."""
        self.authorizer.meter.consumed(user, size_bytes, messages, time.monotonic() * 1000)

    def _visible_to(self, user: str) -> VisibleNames:
        may = self.authorizer.may
        return VisibleNames(
            lambda topic: may(user, Need(VISIBLE, topic_resource(topic))),
            lambda group: may(user, Need(VISIBLE, group_resource(group))),
            is_metered=self.portion(user) is not None,
        )


def _in_order(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments of a call in the order of the method's parameters, defaults included. Raises TypeError if
    the arguments do not fit the signature."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


_protected: Final[list[AuthenticatedServer]] = []
"""The authenticated server of this process. The list has at most one entry, because each actor has its own
process."""


def start_authentication(access: ServerAccess, server_class: str) -> AuthenticatedServer:
    """Authenticate all calls to this process's server, and let the process act as the internal user.

    Raises ClientStateError if the process already acts as another user.
    """
    identity.take(access.internal)
    server = AuthenticatedServer(access, server_class)
    _protected[:] = [server]
    if access.home:
        home = ActorRef(access.home)
        ask = partial(home.call, "auth_state", timeout_s=USERS_TIMEOUT_S)
        threading.Thread(target=server.follow, args=(ask, threading.Event()), name="users", daemon=True).start()
    return server


def authenticated_server() -> AuthenticatedServer | None:
    """Return the authenticated server of this process; None if access is off."""
    return _protected[0] if _protected else None


def lane_users() -> Users | None:
    """Return the users that may connect to this process's lanes (direct socket connections), for the `users` argument
    of the lanes' server. Returns None if access control is off."""
    return _protected[0].authorizer.key_of if _protected else None


def lane_meter() -> Consumption | None:
    """Return the meter that counts the messages sent over this process's lanes (direct socket connections). Returns
    None if access control is off."""
    return _protected[0] if _protected else None


def lane_guard() -> Guard | None:
    """Return the function that authorizes each call over this process's lanes (direct socket connections), for the
    `guard` argument. None if access control is off."""
    return _protected[0].guard if _protected else None


_handed_on: Final[list[ServerAccess]] = []
"""Access settings that a process without an authenticated server (for example the launcher) passes to the servers that
it starts."""


def hand_on(access: ServerAccess) -> None:
    """Set the access settings that this process passes to all servers that it starts from now on. Used by a process
    without an authenticated server."""
    _handed_on[:] = [access]


def access_for(server: str) -> dict[str, Any]:  # Any: the values of the keyword arguments have different types
    """Return the keyword argument that passes access settings to a server that this process starts; an empty dict if
    access control is off."""
    if _protected:
        return {"access": replace(_protected[0].access, server=server, state=_protected[0].authorizer.state)}
    return {"access": replace(_handed_on[0], server=server)} if _handed_on else {}
