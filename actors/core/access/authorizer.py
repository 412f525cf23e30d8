"""The access decisions for one server, if access is on. No Ray, no socket, no thread, no clock.

    a signed call       user_of: who signed it? ▶ admit: may that user call this? ▶ shown: the part it may see
    a frame of a lane   key_of, once: the handshake proves the lane's user ▶ admit, for each frame

`admit` looks up the rights that a call needs (raymq.remoting.access.requests), and checks the user's policies
(raymq.remoting.access.decide). Then it charges the messages that the call sends to the user's quotas. A call that reads
messages is rejected for some time if the user has read too much (actors.core.access.meter). Decisions are cached until
users or policies change, so a frame of a lane (direct socket connection) costs one dict lookup. A method without an
access rule may be called only by super users, and by raymq's own actors, which act as the internal user.

No state survives the process: users and policies are passed with the arguments of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from actors.core.access.meter import CONSUMING, Meter
from raymq.common.errors import AccessDeniedError
from raymq.common.identity import Identity
from raymq.remoting.access.authenticate import Authenticator
from raymq.remoting.access.decide import decide, is_allowed
from raymq.remoting.access.policies import Action, Need, Resource, ResourceType
from raymq.remoting.access.quotas import Quotas
from raymq.remoting.access.requests import Rule
from raymq.remoting.access.signatures import Signature
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import User

DECISIONS_MAX: Final = 20_000
"""Maximum number of access decisions in the cache. A full cache is emptied."""

_Decisions = dict[tuple[str, str, str, tuple[Need, ...]], None]


class Authorizer:
    """Decides which calls users may make to the actor `server`. Thread-safe. All times are in ms of a monotonic
    clock."""

    def __init__(
        self, server: str, internal: Identity, rules: Mapping[str, Rule], state: AuthState, life: bytes | None = None
    ) -> None:
        """`internal`: the user in whose name raymq's actors sign their calls, and the user's key. `rules`: the access
        rules by method. `state`: the initial users and policies.

        `life`: the id of the server's process incarnation, which callers include in their signatures; None generates an
        id.
        """
        self.server, self._internal, self._rules = server, internal, rules
        self._lock = threading.Lock()
        """Lock that guards the records of executed signed calls, and the token buckets that limit how much each user
        may send."""
        self._authenticator = Authenticator(life, internal_key=internal.key)
        self._quotas = Quotas()
        self.meter = Meter(self._user_known)
        self._known: tuple[AuthState, _Decisions] = (state, {})
        """A tuple: the users and policies, and the cache of decisions made from them. A change replaces the whole
        tuple. So a thread that still uses the old users and policies writes only into the old cache."""

    @property
    def state(self) -> AuthState:
        """The users and policies that are in force now."""
        return self._known[0]

    def know(self, state: AuthState) -> None:
        """Replace the current users and policies with `state`, if `state` is newer."""
        with self._lock:
            if state.version > self.state.version:
                self._known = (state, {})

    def key_of(self, user: str) -> bytes | None:
        """Return the key with which a user signs. Returns None if the user does not exist or is disabled, or if `user`
        is empty."""
        if user == self._internal.user:
            return self._internal.key
        known = self.state.users.get(user)
        return known.key if known is not None and known.is_enabled else None

    def user_of(self, signature: Signature, method: str, payload: bytes, now_ms: int) -> str:
        """Return the user who signed a call of `method`, and record the call as executed.

        Raises AuthenticationError if the signature is invalid or the call was executed before. Raises
        SignedTooEarlyError if the call was signed for an earlier process of this server, or too long ago.
        """
        with self._lock:
            user = self._authenticator.user_of(self.state, signature, self.server, method, payload, now_ms=now_ms)
        return user.name

    def admit(self, user: str, address: str, method: str, arguments: Sequence[Any], monotonic_ms: float) -> None:
        """Check that a user may call a method with these arguments, and charge the sent messages to the user's quotas.

        `address`: the user's address, "" if unknown. `arguments`: in the order of the method's parameters.

        Raises AccessDeniedError, which names user, action and resource, if no policy grants the call. Raises
        QuotaExceededError, which states when the user may send again, if a quota is used up. After an error the call
        must not be executed.
        """
        if user == self._internal.user:
            return
        rule = self._rules.get(method)
        needs = (self._all_of(method),) if rule is None else tuple(rule.needed(arguments))
        state, decisions = self._known
        one = (user, address, method, needs)
        if one not in decisions:
            decide(state, self._user(state, user, method), address, needs)
            if len(decisions) >= DECISIONS_MAX:
                decisions.clear()
            decisions[one] = None
        if method in CONSUMING:
            self.meter.require_left(user, monotonic_ms)
        weigh = WEIGHTS.get(method)
        if weigh is not None:
            sender = self._user(state, user, method)
            if sender.bytes_per_second or sender.messages_per_second:
                size, messages = weigh(arguments)
                with self._lock:
                    self._quotas.take(sender, size, messages, monotonic_ms)

    def may(self, user: str, need: Need) -> bool:
        """Return True if the user's policies grant the right `need`, for a client whose address is unknown."""
        if user == self._internal.user:
            return True
        state = self.state
        known = state.users.get(user)
        return known is not None and is_allowed(state, known, "", need)

    def _user_known(self, name: str) -> User | None:
        return self.state.users.get(name)

    def _user(self, state: AuthState, name: str, method: str) -> User:
        user = state.users.get(name)
        if user is None:  # the user was deleted after the user's lane was opened
            raise AccessDeniedError(name, str(self._all_of(method)), "the user no longer exists")
        return user

    def _all_of(self, method: str) -> Need:
        """Return the right that a method without an access rule requires. No policy can grant this right."""
        return Need((Action.ALL,), Resource(ResourceType.SERVER, f"{self.server}.{method}"))


def _weigh_batches(arguments: Sequence[Any]) -> tuple[int, int]:
    batches: Iterable[Any] = arguments[0]
    size = messages = 0
    for batch in batches:
        size += len(batch.records)
        messages += len(batch.sizes)
    return size, messages


def _weigh_send(arguments: Sequence[Any]) -> tuple[int, int]:
    return len(arguments[1]), 1


def _weigh_direct(arguments: Sequence[Any]) -> tuple[int, int]:
    return len(arguments[0].request), 1


WEIGHTS: Final[Mapping[str, Callable[[Sequence[Any]], tuple[int, int]]]] = {
    "append": _weigh_batches,
    "send": _weigh_send,
    "ask_listener": _weigh_direct,
}
"""For each method that sends messages: a function that returns the total bytes and the number of messages in a call's
arguments."""
