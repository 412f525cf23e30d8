"""GatewayAccess decides whether a client may make a call, if access is on, and counts what its user sends and consumes.

The gateway calls raymq's servers as raymq's internal user, which may do everything. So the gateway itself checks each
call by the rules of lanes: the user that signed the call, the user's policies, and the user's quotas.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Final
from urllib.parse import unquote

from raymq.common.errors import AuthenticationError
from raymq.gateway.calls import CallContext
from raymq.gateway.convert.signatures import authenticate
from raymq.remoting.access.decide import VISIBLE, decide, is_allowed
from raymq.remoting.access.policies import Action, Need, ResourceType, group_resource, topic_resource
from raymq.remoting.access.quotas import Quotas
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import BOUNDS, CONSUME_BOUNDS, User, gateway_secret

GATEWAY_DECISIONS_MAX: Final = 20_000
"""Maximum number of decisions that are kept. Beyond this number all are dropped."""
NEEDS_KNOWN_MAX: Final = 4096
"""Number of topics, and of groups, whose rights are kept for the next call."""
_AUTHORIZATION: Final = "authorization"
_DATE_TIME: Final = "x-mq-date-time"

_secret_of_key = lru_cache(maxsize=1000)(gateway_secret)


def sends(topic: str) -> Need:
    """Return the right that sending to a topic needs. To send to a retry topic is a right of the group's consumers."""
    resource = topic_resource(topic)
    return Need((Action.SUB if resource.type is ResourceType.GROUP else Action.PUB,), resource)


def consumes(group: str, *topics: str) -> tuple[Need, ...]:
    """Return the rights that consuming topics in a group needs."""
    return _consumes_group(group), *(_consumes_topic(topic) for topic in topics)


@lru_cache(maxsize=NEEDS_KNOWN_MAX)
def _consumes_group(group: str) -> Need:
    return Need((Action.SUB,), group_resource(group))


@lru_cache(maxsize=NEEDS_KNOWN_MAX)
def _consumes_topic(topic: str) -> Need:
    return Need((Action.SUB,), topic_resource(topic))


def reads(topic: str) -> Need:
    """Return the right that reading a topic's messages without a group needs."""
    return Need((Action.SUB, Action.GET), topic_resource(topic))


def sees(topic: str) -> Need:
    """Return the right that asking for a topic's queues needs."""
    return Need(VISIBLE, topic_resource(topic))


def creates(topic: str) -> Need:
    """Return the right that creating a topic by its first use needs."""
    return Need((Action.PUB, Action.CREATE), topic_resource(topic))


def address_of(peer: str) -> str:
    """Return the IP address in the text with which gRPC names a caller, such as ``ipv4:10.0.0.7:4711``; empty if the
    text has none."""
    kind, _, place = unquote(peer).partition(":")
    host = place.rpartition(":")[0].strip("[]")
    return host if kind in ("ipv4", "ipv6") else ""


class GatewayAccess:
    """The access control of one gateway process. Used in the event loop.

    `state`: returns the users and policies in force, at most 2 s old; None if access is off. `gateways`: returns the
    number of live gateway processes, which share each quota. `monotonic_ms`: a monotonic clock in ms. `now_s`: the time
    in s since 1970.
    """

    def __init__(
        self,
        state: Callable[[], AuthState] | None,
        *,
        monotonic_ms: Callable[[], float] = lambda: time.monotonic() * 1000,
        now_s: Callable[[], float] = time.time,
        gateways: Callable[[], int] = lambda: 1,
    ) -> None:
        self._state, self._monotonic_ms, self._now_s, self._gateways = state, monotonic_ms, now_s, gateways
        self._sent, self._consumed = Quotas(), Quotas(CONSUME_BOUNDS, "consumed ")
        self._decided: tuple[AuthState | None, set[tuple[str, str, tuple[Need, ...]]]] = (None, set())
        """The users and policies, and the calls that they allow."""

    @property
    def is_on(self) -> bool:
        """True if each call needs a user."""
        return self._state is not None

    def authenticated(self, call: CallContext) -> CallContext:
        """Return a call with the user that signed it. If access is off, signatures are ignored.

        Raises AuthenticationError if the call is not signed, or not by an enabled user.
        """
        if self._state is None:
            return call
        users = self._state().users

        def secret_of(name: str) -> str | None:
            user = users.get(name)
            return _secret_of_key(user.key) if user is not None and user.is_enabled else None

        headers = call.metadata
        user = authenticate(headers.get(_AUTHORIZATION, ""), headers.get(_DATE_TIME, ""), secret_of, self._now_s())
        return replace(call, user=user)

    def require(self, call: CallContext, *needs: Need) -> None:
        """Raise AccessDeniedError unless the user of an authenticated call has all rights in `needs`. Raises
        AuthenticationError if the user was deleted."""
        if self._state is None:
            return
        state, address = self._state(), address_of(call.peer)
        if state is not self._decided[0] or len(self._decided[1]) >= GATEWAY_DECISIONS_MAX:
            self._decided = state, set()
        one = call.user, address, needs
        if one not in self._decided[1]:
            decide(state, self._user(call), address, needs)
            self._decided[1].add(one)

    def may(self, call: CallContext, need: Need) -> bool:
        """Return whether the user of an authenticated call has a right now. A deleted user has none."""
        if self._state is None:
            return True
        state = self._state()
        user = state.users.get(call.user)
        return user is not None and is_allowed(state, user, address_of(call.peer), need)

    def take_sent(self, call: CallContext, size_bytes: int, messages: int) -> None:
        """Charge messages to the user before they are sent. Raises QuotaExceededError, and charges nothing, if the
        user has sent too much: nothing may be sent."""
        user = self._with_share(call)
        if user is not None:
            self._sent.take(user, size_bytes, messages, self._monotonic_ms())

    def portion(self, call: CallContext, messages: int) -> int:
        """Return how many messages one receive may have, at most `messages`. Raises QuotaExceededError if the user has
        consumed too much."""
        user = self._with_share(call)
        if user is None:
            return messages
        self._consumed.require_left(user, self._monotonic_ms())
        return min(messages, user.consume_messages_per_second or messages)

    def charge_consumed(self, call: CallContext, size_bytes: int, messages: int) -> None:
        """Charge messages to the user that receives them."""
        # a user that was deleted after the receive began gets no further messages
        if self._state is not None and call.user in self._state().users:
            user = self._with_share(call)
            if user is not None:
                self._consumed.charge(user, size_bytes, messages, self._monotonic_ms())

    def _with_share(self, call: CallContext) -> User | None:
        """Return the user of a call, with this process's share of the user's quotas; None for a user without quotas."""
        if self._state is None:
            return None
        user = self._user(call)
        bounds = user.bounds
        if not any(bounds.values()):
            return None
        count = max(self._gateways(), 1)
        return replace(user, **{name: -(-bounds[name] // count) for name in BOUNDS})  # type: ignore[literal-required]

    def _user(self, call: CallContext) -> User:
        user = None if self._state is None else self._state().users.get(call.user)
        if user is None:
            raise AuthenticationError("the user of this call no longer exists")
        return user
