"""Stand-in classes for actors. Ray starts a stand-in instead of the real actor class; the stand-in checks access before
each method.

    handle.fetch(…)                     plain: refused if access control is on
    handle.signed_fetch(signature, …)   signed variant: checks the signature, then calls the real method

`server_class_body` builds the methods. actors.actor_class uses them for the stand-ins of raymq's servers.

`owned_actor` builds stand-ins of the actors that run a user's code: Listeners and PredicateRunners. Such an actor
serves only its owner, the user who started it. It runs in the user's environment, has no list of users, and must not
have the key of raymq's own actors. The owner's calls are signed with the owner's key. The calls of its Pull actor are
signed with another key, which is made for this one actor. The Pull actor gets that key in the Listener's signed calls
(raymq.client.consumer.push.hosting).

The check does not stop code that runs in the cluster's processes: see docs/access.md.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol

from raymq.common.errors import AuthenticationError
from raymq.common.identity import SIGNED, Identity
from raymq.remoting.access.authenticate import Authenticator
from raymq.remoting.access.signatures import Signature
from raymq.remoting.access.state import NO_USERS
from raymq.remoting.access.users import INTERNAL_USER, User

OWNER_NONCES_MAX: Final = 100_000
"""Maximum number of signed calls whose nonces an owned actor stores, about 10 MB. The nonces are stored to refuse
repeated calls."""


class CallAuthentication(Protocol):
    """Interface of the check that runs before each method of an actor if access control is on."""

    def refuse_unsigned(self, method: str) -> NoReturn:
        """Refuse a call that has no signature. Always raises AuthenticationError."""

    def authenticate_call(self, name: str, signature: Any, payload: bytes, method: Callable[..., Any]) -> Any:
        """Check the signature of a call to the actor method `name`, and run the method (`method`). Raises
        AuthenticationError if the check fails."""


@dataclass(frozen=True, slots=True)
class ActorOwner:
    """The owner of an actor that serves only its owner, and the key of raymq's own calls to it. This value is pickled
    with the actor's arguments, and never printed.

    `actor`: the actor's name, which signatures contain. `owner`: the user who started the actor. `call_key`: the key
    with which raymq's own actors sign their calls to this actor; empty if they make no calls.
    """

    actor: str
    owner: Identity
    call_key: bytes = field(default=b"", repr=False)


class OwnerAuthentication:
    """Authenticates the calls to an actor that serves only its owner. Thread-safe.

    `clock` returns ms and never goes back. `life`: the id of this process incarnation; None creates a random id.
    """

    def __init__(
        self,
        access: ActorOwner,
        clock: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        life: bytes | None = None,
    ) -> None:
        self._access, self._clock = access, clock
        self._lock = threading.Lock()
        """Lock that guards the authenticator, which stores the nonces of accepted calls."""
        owner, internal = access.owner, access.call_key or None
        if owner.user == INTERNAL_USER:
            self._state, internal = NO_USERS, owner.key
        else:
            self._state = NO_USERS.with_user(User(owner.user, owner.key), is_new=True)
        self._authenticator = Authenticator(life, internal_key=internal, nonces_max=OWNER_NONCES_MAX)

    def refuse_unsigned(self, method: str) -> NoReturn:
        """Refuse a call that has no signature. Always raises AuthenticationError."""
        raise AuthenticationError(
            f"the call {method} of {self._access.actor} is only for user {self._access.owner.user!r}, and "
            "must be signed"
        )

    def authenticate_call(self, name: str, signature: Any, payload: bytes, method: Callable[..., Any]) -> Any:
        """Run a call of this actor. The call must be signed by the actor's owner (a user), or by raymq's internal user,
        as whom the Pull actor signs.

        Raises AuthenticationError for any other call and for a repeated call. Then the method is not called, and the
        arguments are not unpickled.
        """
        import pickle

        if not isinstance(signature, Signature) or not isinstance(payload, bytes):
            self.refuse_unsigned(name)
        if signature.user not in (self._access.owner.user, INTERNAL_USER):
            self.refuse_unsigned(name)
        with self._lock:
            self._authenticator.user_of(self._state, signature, self._access.actor, name, payload, now_ms=self._clock())
        args, kwargs = pickle.loads(payload)
        return method(*args, **kwargs)


def owned_actor(real: type) -> type:
    """Return a stand-in class that behaves like the actor class `real`. Its constructor has the additional parameter
    `access`: an ActorOwner, or None to serve every caller.

    Ray pickles the returned class by value, and the real class by reference.
    """

    def construct(self: Any, *args: Any, access: Any = None, **kwargs: Any) -> None:
        from raymq.remoting.access.stand_in import OwnerAuthentication

        self._authentication = None if access is None else OwnerAuthentication(access)
        self._real = real(*args, **kwargs)

    return type(real.__name__, (), server_class_body(real, construct))


def server_class_body(real: type, construct: Callable[..., None]) -> dict[str, Any]:
    """Build the namespace of a stand-in class for the actor class `real`. It has the constructor `construct`, each
    public method, and the signed variant of each public method.

    An instance has `_real`, the real object, and `_authentication`: a CallAuthentication, or None if access control is
    off.
    """
    namespace: dict[str, Any] = {"__doc__": real.__doc__, "__module__": real.__module__, "__init__": construct}
    construct.__doc__ = real.__init__.__doc__  # type: ignore[misc]  # it is read only
    construct.__signature__ = _with_access(inspect.signature(real.__init__))  # type: ignore[attr-defined,misc]  # as below
    for name, function in inspect.getmembers(real, inspect.isfunction):
        if name.startswith("_"):
            continue
        plain, signed = _forward(name), _forward_signed(name)
        plain.__doc__ = function.__doc__
        plain.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # typeshed lacks it
        for method in (plain, signed):
            method.__dict__.update(_marks_of_ray(function))
            namespace[method.__name__] = method
    return namespace


def _with_access(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature of a constructor, extended by the parameter `access`."""
    parameters = list(signature.parameters.values())
    if any(one.name == "access" for one in parameters):
        raise TypeError(
            "the constructor of a server must not have a parameter named access, which its stand-in class adds"
        )
    at = next((index for index, one in enumerate(parameters) if one.kind is one.VAR_KEYWORD), len(parameters))
    parameters.insert(at, inspect.Parameter("access", inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._authentication is not None:
            self._authentication.refuse_unsigned(name)
        return getattr(self._real, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _forward_signed(name: str) -> Callable[..., Any]:
    """Build the signed variant of an actor's method. If access control is off, the variant ignores the signature. So a
    client may sign all its calls."""

    def method(self: Any, signature: Any, payload: bytes) -> Any:
        if self._authentication is not None:
            return self._authentication.authenticate_call(name, signature, payload, getattr(self._real, name))
        import pickle

        args, kwargs = pickle.loads(payload)
        return getattr(self._real, name)(*args, **kwargs)

    method.__name__ = SIGNED + name
    method.__doc__ = f"`{name}`, with a signature and the pickled arguments."
    return method


def _marks_of_ray(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the attributes that `ray.method` has set on a method, for example its concurrency group."""
    return {name: value for name, value in vars(function).items() if name.startswith("__ray_")}
