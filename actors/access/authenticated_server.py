"""The access control of a server's process, if access is on: every call and every lane passes it.

A stand-in (actors.actor_class) calls `start_authentication` before it makes the real server. From then on the process
acts as raymq's internal user in its own calls. Its lanes require users, and the authorizer checks each frame
(`lane_users`, `lane_guard`). A method can only be called by its signed twin: first the signature is checked, then the
arguments are unpickled, then the authorizer decides (actors.core.access.authorizer). A returned list is cut to what the
user may see (actors.core.access.shown).

This keeps users of raymq away from each other's topics. It does not protect against clients that may submit any work to
Ray: Ray itself unpickles what comes with an actor call, and the holder of Ray's token may run code.

The servers that this server starts get the same access by `access_for`. The first broker group keeps changes of users
and policies in its log. Every authenticated server asks this group for changes at intervals. Nothing else survives the
process. If access is off, none of this exists.
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
"""The interval at which each server asks the broker for changes of users and policies."""
USERS_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The access that a server is started with. It is pickled with the server's arguments, and never displayed.

    `server`: the actor's name. `internal`: the user with which raymq's own actors sign. `state`: the initial users and
    policies. `home`: the broker group that keeps changes of them; empty if nothing changes. `owner`: the super user of
    the settings, whose secret and rights always come from the settings.
    """

    server: str
    internal: Identity
    state: AuthState = field(default=NO_USERS, repr=False)
    home: str = ""
    owner: str = ""


class AuthenticatedServer:
    """The access control of one server, of the class `server_class`. Thread-safe.

    `clock` returns ms and never goes back. `life`: the id of this process; None draws one.
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
        """Use these users and policies from now on, if they are newer than the current ones."""
        self.authorizer.know(self.with_owner(state))

    def with_owner(self, state: AuthState) -> AuthState:
        """Return these users and policies, with the super user as defined in the settings."""
        return state.with_owner(self.access.state.users.get(self.access.owner))

    def follow(self, ask: Callable[[int], AuthState | None], stopping: threading.Event) -> None:
        """Ask for newer users and policies at intervals, until `stopping` is set.

        A failure is logged once until it is over; until then the current users and policies apply.
        """
        failed = False
        while not stopping.is_set():
            try:
                state = ask(self.authorizer.state.version)
                if state is not None:
                    self.know(state)
                failed = False
            except Exception as error:  # without this thread a deleted user would keep access
                if not failed:
                    logger.info("%s cannot ask for changes of users, and retries: %s", self._server, error)
                failed = True
            stopping.wait(USERS_INTERVAL_S)

    def is_owners_secret(self, secret: str) -> bool:
        """True for the secret of the super user of the settings. Takes about 30 ms for any secret."""
        owner = self.access.state.users.get(self.access.owner)
        if owner is None or len(secret) < SECRET_MIN_CHARACTERS:
            return False
        return hmac.compare_digest(owner.key, derive_key(owner.name, secret))

    def refuse_unsigned(self, method: str) -> NoReturn:
        """Refuse a call that is not signed. Raises AuthenticationError."""
        raise AuthenticationError(
            f"{method} of {self._server} needs a user: give raymq.connect credentials, or set RAYMQ_USER and "
            "RAYMQ_SECRET"
        )

    def authenticate_call(self, name: str, signature: Any, payload: bytes, method: Callable[..., Any]) -> Any:
        """Execute a signed call of `method`, called `name`, and return the part of the result that its user may see.

        AuthenticationError: the call is not signed by the user it names, or was executed before. SignedTooEarlyError:
        the call must be signed again for this process. AccessDeniedError and QuotaExceededError as in
        `Authorizer.admit`; the method was then not called.
        """
        if not isinstance(signature, Signature) or not isinstance(payload, bytes):
            self.refuse_unsigned(name)
        try:
            user = self.authorizer.user_of(signature, name, payload, self._clock())
        except SignedTooEarlyError:
            raise  # raised by each client's first call of this process
        except AuthenticationError as error:
            logger.warning("a call of %s.%s is refused: %s", self._server, name, error)
            raise
        args, kwargs = pickle.loads(payload)  # only now: nothing of a call is trusted before its signature is checked
        if user == self.access.internal.user:
            return method(*args, **kwargs)
        self.authorizer.admit(user, "", name, _in_order(method, args, kwargs), time.monotonic() * 1000)
        answer = method(*args, **kwargs)
        weigh = HANDED_OUT.get(name)
        if weigh is not None and self.portion(user) is not None:
            self.consumed(user, *weigh(answer))
        return cut(self._class, name, answer, self._visible_to(user))

    def guard(self, request: LaneRequest, method: str, arguments: Sequence[Any]) -> None:
        """Raise unless a frame's user may call a method with these arguments (raymq.remoting.lane.calls.Guard)."""
        self.authorizer.admit(request.user, request.address, method, arguments, time.monotonic() * 1000)

    def portion(self, user: str) -> ReadLimit | None:
        """Return the most that a request of a user may read (actors.core.access.meter.Consumption)."""
        return self.authorizer.meter.portion(user)

    def consumed(self, user: str, size_bytes: int, messages: int) -> None:
        """Record that a user gets messages (actors.core.access.meter.Consumption)."""
        self.authorizer.meter.consumed(user, size_bytes, messages, time.monotonic() * 1000)

    def _visible_to(self, user: str) -> VisibleNames:
        may = self.authorizer.may
        return VisibleNames(
            lambda topic: may(user, Need(VISIBLE, topic_resource(topic))),
            lambda group: may(user, Need(VISIBLE, group_resource(group))),
            is_metered=self.portion(user) is not None,
        )


def _in_order(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """Return the arguments of a call in the method's order, with defaults. TypeError as the call itself raises it."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


_protected: Final[list[AuthenticatedServer]] = []
"""The authenticated server of this process, at most one: each actor has a process of its own."""


def start_authentication(access: ServerAccess, server_class: str) -> AuthenticatedServer:
    """Authenticate all calls of this process's server, and let the process act as the internal user.

    ClientStateError: the process acts as another user already.
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
    """Return the `users` of this process's lanes; None if access is off."""
    return _protected[0].authorizer.key_of if _protected else None


def lane_meter() -> Consumption | None:
    """Return the meter of what this process's lanes return; None if access is off."""
    return _protected[0] if _protected else None


def lane_guard() -> Guard | None:
    """Return the `guard` of this process's lanes; None if access is off."""
    return _protected[0].guard if _protected else None


_handed_on: Final[list[ServerAccess]] = []
"""The access that a process without such a server, for example the launcher, gives to the servers that it starts."""


def hand_on(access: ServerAccess) -> None:
    """Start servers with this access from now on, in a process without an authenticated server."""
    _handed_on[:] = [access]


def access_for(server: str) -> dict[str, Any]:  # Any: keyword arguments
    """Return the keyword argument with the access for a server that this process starts; empty if access is off."""
    if _protected:
        return {"access": replace(_protected[0].access, server=server, state=_protected[0].authorizer.state)}
    return {"access": replace(_handed_on[0], server=server)} if _handed_on else {}
