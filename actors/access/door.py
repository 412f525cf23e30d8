"""The door of a server's process, where access is on: every call and every lane comes through it.

A stand-in (actors.actor_class) opens the door before it makes the real server. From then on the process acts as raymq's
internal user in its own calls; its lanes ask for users, and their frames pass the gate (`lane_users`, `lane_guard`). A
method is called by its signed twin only: the signature is checked, the arguments are unpickled after that, the gate
decides (actors.core.access.gate), and a list is cut to what the user may see (actors.core.access.shown).

This keeps users of raymq from each other's topics. It does not keep out who may submit any work to Ray: Ray itself
unpickles what comes with an actor call, and whoever has Ray's token may run code.

The servers that this one starts get the same access by `access_for`. Users and policies that are changed while raymq
runs are kept by the first broker group, in its log; every door asks it for them at intervals. Nothing else survives
the process. Where access is off none of this exists.
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

from actors.core.access.gate import Gate
from actors.core.access.meter import HANDED_OUT, Consumption, Portion
from actors.core.access.shown import Sight, cut
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
"""A change of users or policies is known to every server after so long, or as soon as it reaches the broker again."""
USERS_TIMEOUT_S: Final = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """The access that a server is started with; it is pickled with the server's arguments, and shown nowhere.

    `server`: the actor's name. `internal`: as whom raymq's own actors sign. `state`: the users and policies at first.
    `home`: the broker group that keeps changes of them; empty where nothing changes. `owner`: the super user of the
    settings, who is as the settings say.
    """

    server: str
    internal: Identity
    state: AuthState = field(default=NO_USERS, repr=False)
    home: str = ""
    owner: str = ""


class Door:
    """The door of one server, of the class `server_class`. Thread-safe.

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
        self.gate = Gate(access.server, access.internal, rules_of(server_class), access.state, life)

    def know(self, state: AuthState) -> None:
        """Decide by these users and policies from now on, if they are newer than those that are known."""
        self.gate.know(self.with_owner(state))

    def with_owner(self, state: AuthState) -> AuthState:
        """These users and policies, with the super user of the settings as the settings have it."""
        return state.with_owner(self.access.state.users.get(self.access.owner))

    def follow(self, ask: Callable[[int], AuthState | None], stopping: threading.Event) -> None:
        """Ask for newer users and policies again and again, until `stopping` is set. A failure is logged, once until
        it is over: what is known counts meanwhile."""
        failed = False
        while not stopping.is_set():
            try:
                state = ask(self.gate.state.version)
                if state is not None:
                    self.know(state)
                failed = False
            except Exception as error:  # without this thread a deleted user would stay for good
                if not failed:
                    logger.info("%s cannot ask for changes of users now: %s", self._server, error)
                failed = True
            stopping.wait(USERS_INTERVAL_S)

    def is_owners_secret(self, secret: str) -> bool:
        """True for the secret of the super user of the settings. Takes some 30 ms, whatever the secret."""
        owner = self.access.state.users.get(self.access.owner)
        if owner is None or len(secret) < SECRET_MIN_CHARACTERS:
            return False
        return hmac.compare_digest(owner.key, derive_key(owner.name, secret))

    def refuse_unsigned(self, method: str) -> NoReturn:
        """Refuse a call that is not signed. AuthenticationError."""
        raise AuthenticationError(
            f"{method} of {self._server} needs a user: give raymq.connect credentials, or set RAYMQ_USER and "
            "RAYMQ_SECRET"
        )

    def enter(self, name: str, signature: Any, payload: bytes, method: Callable[..., Any]) -> Any:
        """Carry out a signed call of `method`, called `name`, and return what its user may see of the result.

        AuthenticationError if it is not signed by the user it names, or was taken before; SignedTooEarlyError if it
        must be signed anew for this process; AccessDeniedError and QuotaExceededError as `Gate.admit`: then the method
        was not called.
        """
        if not isinstance(signature, Signature) or not isinstance(payload, bytes):
            self.refuse_unsigned(name)
        try:
            user = self.gate.user_of(signature, name, payload, self._clock())
        except SignedTooEarlyError:
            raise  # each client's first call of this process
        except AuthenticationError as error:
            logger.warning("a call of %s.%s is refused: %s", self._server, name, error)
            raise
        args, kwargs = pickle.loads(payload)  # only now: nothing of a call counts before its signature
        if user == self.access.internal.user:
            return method(*args, **kwargs)
        self.gate.admit(user, "", name, _in_order(method, args, kwargs), time.monotonic() * 1000)
        answer = method(*args, **kwargs)
        weigh = HANDED_OUT.get(name)
        if weigh is not None and self.portion(user) is not None:
            self.consumed(user, *weigh(answer))
        return cut(self._class, name, answer, self._sight(user))

    def guard(self, request: LaneRequest, method: str, arguments: Sequence[Any]) -> None:
        """Raise unless a frame's user may call a method with these arguments (raymq.remoting.lane.calls.Guard)."""
        self.gate.admit(request.user, request.address, method, arguments, time.monotonic() * 1000)

    def portion(self, user: str) -> Portion | None:
        """The most that a request of a user may read (actors.core.access.meter.Consumption)."""
        return self.gate.meter.portion(user)

    def consumed(self, user: str, size_bytes: int, messages: int) -> None:
        """Note that a user gets messages (actors.core.access.meter.Consumption)."""
        self.gate.meter.consumed(user, size_bytes, messages, time.monotonic() * 1000)

    def _sight(self, user: str) -> Sight:
        may = self.gate.may
        return Sight(
            lambda topic: may(user, Need(VISIBLE, topic_resource(topic))),
            lambda group: may(user, Need(VISIBLE, group_resource(group))),
            is_metered=self.portion(user) is not None,
        )


def _in_order(method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The arguments of a call in the order of the method's own, with its defaults. TypeError as the call itself."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.values())


_open: Final[list[Door]] = []
"""The door of this process, at most one: an actor has its process for itself."""


def open_door(access: ServerAccess, server_class: str) -> Door:
    """Open the door of this process's server; the process acts as the internal user from now on. ClientStateError if it
    acts as somebody else."""
    identity.take(access.internal)
    door = Door(access, server_class)
    _open[:] = [door]
    if access.home:
        home = ActorRef(access.home)
        ask = partial(home.call, "auth_state", timeout_s=USERS_TIMEOUT_S)
        threading.Thread(target=door.follow, args=(ask, threading.Event()), name="users", daemon=True).start()
    return door


def door_here() -> Door | None:
    """The door of this process's server; None where access is off."""
    return _open[0] if _open else None


def lane_users() -> Users | None:
    """The `users` of this process's lanes; None where access is off."""
    return _open[0].gate.key_of if _open else None


def lane_meter() -> Consumption | None:
    """The meter of what this process's lanes hand out; None where access is off."""
    return _open[0] if _open else None


def lane_guard() -> Guard | None:
    """The `guard` of this process's lanes; None where access is off."""
    return _open[0].guard if _open else None


_handed_on: Final[list[ServerAccess]] = []
"""The access that a process without a door gives to the servers it starts: the launcher has one."""


def hand_on(access: ServerAccess) -> None:
    """Start servers with this access from now on, in a process that has no door."""
    _handed_on[:] = [access]


def access_for(server: str) -> dict[str, Any]:  # Any: keyword arguments
    """The keyword argument that gives a server, which this process starts, its access; none where access is off."""
    if _open:
        return {"access": replace(_open[0].access, server=server, state=_open[0].gate.state)}
    return {"access": replace(_handed_on[0], server=server)} if _handed_on else {}
