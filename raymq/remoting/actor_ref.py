"""Calls to Ray actors. No other client module calls actors, or converts Ray's errors into raymq's errors.

A call in the name of a user (raymq.common.identity) is signed, and goes to the method's signed twin. Every call has a
timeout. A call that Ray reports as failed may have run. So a failure means only that no answer came, and the caller
decides if its call is safe to repeat.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import ray
from ray import cloudpickle
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from raymq.common import identity
from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError, SignedTooEarlyError
from raymq.common.identity import Identity
from raymq.common.names import NAMESPACE, NameServerName
from raymq.remoting.access.signatures import NONCE_BYTES, Signature, sign

NAME_SERVERS_MAX: Final = 3
"""The most NameServers that a cluster has."""
DEFAULT_TIMEOUT_S = 10.0
"""Limits an actor call whose caller gives no timeout."""
SIGN_AGAIN_S: Final = 0.05
"""The pause before a call is signed for the third time, because its actor restarts again and again."""
CLOCKS_MAX: Final = 10_000
"""The most actors whose clocks a client keeps. If there are more, all are forgotten and learnt again."""

_clocks: Final[dict[str, tuple[bytes, int]]] = {}
"""By actor: the id of its process, and the ms by which that process's clock is ahead of this process's clock."""

logger = logging.getLogger(__name__)


def running_nameservers() -> list[NameServerName]:
    """Return the names of the NameServers that run in the Ray cluster of this process."""
    found = []
    for index in range(NAME_SERVERS_MAX):
        name = NameServerName(index)
        try:
            ray.get_actor(str(name), namespace=NAMESPACE)
        except ValueError:
            continue
        found.append(name)
    return found


class ActorRef:
    """A named raymq actor, looked up at the first call and again after the actor has died for good.

    Thread-safe. A handle stays valid over restarts by Ray. It is dropped only if Ray reports the actor as dead, because
    another actor may have taken the name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._handle: Any = None

    def handle(self) -> Any:
        """Return the actor's handle. ServiceNotAvailableError if no actor has this name."""
        with self._lock:
            if self._handle is None:
                try:
                    self._handle = ray.get_actor(self.name, namespace=NAMESPACE)
                except ValueError:
                    raise ServiceNotAvailableError(
                        f"actor {self.name!r} does not run in this Ray cluster; see `raymq status`, or `raymq up`"
                    ) from None
            return self._handle

    def drop_handle(self) -> None:
        """Drop the handle, so that the next call looks the name up again."""
        with self._lock:
            self._handle = None

    def call(self, method: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any) -> Any:
        """Call a method and wait for its result.

        Raises what the method raised if that is a RaymqError; RequestTimeoutError without an answer in time;
        ServiceNotAvailableError if the actor is dead, restarting or unreachable. After the last two errors the call may
        have run.
        """
        try:
            return _call(lambda: self.start(method, *args, **kwargs), f"{self.name}.{method}", timeout_s)
        except ActorGoneError:
            self.drop_handle()
            raise

    def start(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method without waiting, and return Ray's reference to the result.

        The call is signed if this process acts as a user. ServiceNotAvailableError if no actor has this name.
        """
        return _start(self.handle(), self.name, identity.present(), method, args, kwargs)

    def tell(self, method: str, *args: Any) -> None:
        """Call a method, and ignore its result and its failure. A call that the actor wants signed again is repeated.

        ServiceNotAvailableError if no actor has this name.
        """

        def sign_anew(answer: Any) -> None:
            failure = answer.exception()
            if isinstance(failure, RayTaskError) and isinstance(failure.cause, SignedTooEarlyError):
                _learn(failure.cause)
                try:
                    self.start(method, *args)
                except RaymqError as error:
                    logger.info("%s.%s was not called: %s", self.name, method, error)

        started = self.start(method, *args)
        if identity.present() is not None:
            started.future().add_done_callback(sign_anew)


class HandleRef:
    """An actor in another namespace, called by its handle: a Listener or a PredicateRunner. Thread-safe.

    Signatures contain the actor's `name`. Calls are signed as `who`, or unsigned if `who` is None.
    """

    def __init__(self, name: str, handle: Any, who: Identity | None) -> None:
        self.name, self.handle, self._who = name, handle, who

    def call(self, method: str, *args: Any, what: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Call a method and wait for its result. Raises as `ActorRef.call`; errors name the call as `what`."""
        return _call(lambda: self.start(method, *args), what or f"{self.name}.{method}", timeout_s)

    def start(self, method: str, *args: Any) -> Any:
        """Call a method without waiting, and return Ray's reference to the result."""
        return _start(self.handle, self.name, self._who, method, args, {})


def _start(
    handle: Any, actor: str, who: Identity | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Start a call of an actor's method, or of the method's signed twin if `who` signs the call."""
    if who is None:
        return getattr(handle, method).remote(*args, **kwargs)
    signature, payload = _signed(who, actor, method, args, kwargs)
    return getattr(handle, identity.SIGNED + method).remote(signature, payload)


def _call(start: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """Start a call and wait for its result, signing it again until the timeout if the actor demands that.

    The actor refuses, and does not run, a call that was signed for another process of the actor or for none.
    """
    until_s = time.monotonic() + timeout_s
    left_s, pause_s = timeout_s, 0.0
    while True:
        try:
            return resolve(start(), what, left_s)
        except SignedTooEarlyError:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise
            time.sleep(min(pause_s, left_s))
            pause_s = SIGN_AGAIN_S


def _signed(
    who: Identity, actor: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Signature, bytes]:
    """Return a call's signature, and its arguments as the signed bytes."""
    # Ray replaces references by results among plain arguments only.
    values = [ray.get(one, timeout=DEFAULT_TIMEOUT_S) if isinstance(one, ray.ObjectRef) else one for one in args]
    payload = cloudpickle.dumps((values, kwargs))
    life, ahead_ms = _clocks.get(actor, (b"", 0))
    now_ms = time.monotonic_ns() // 1_000_000 + ahead_ms
    return sign(who.user, who.key, actor, method, payload, life, now_ms, secrets.token_bytes(NONCE_BYTES)), payload


def _learn(error: SignedTooEarlyError) -> None:
    """Keep the process and the clock that an actor's refusal names, for later signatures."""
    if len(_clocks) >= CLOCKS_MAX:
        _clocks.clear()
    _clocks[error.actor] = error.life, error.now_ms - time.monotonic_ns() // 1_000_000


class ActorGoneError(ServiceNotAvailableError):
    """The actor died for good; another actor may take its name."""


def resolve(reference: Any, what: str, timeout_s: float) -> Any:
    """Wait up to `timeout_s` for a call's result, as `ray.get`, with raymq's errors. Errors name the call as `what`.

    Raises as `ActorRef.call`; ActorGoneError if the actor died for good.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except GetTimeoutError:
        raise RequestTimeoutError(what, timeout_s) from None
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, SignedTooEarlyError):
            _learn(cause)
        if isinstance(cause, RaymqError):
            raise cause from None
        raise ServiceNotAvailableError(f"{what} failed in its actor: {cause!r}") from error
    except (ActorDiedError, ActorUnschedulableError) as error:  # unschedulable: the actor's node is gone
        raise ActorGoneError(f"{what}: the actor is dead ({_reason(error)}); see `raymq status`") from error
    except (ActorUnavailableError, RayActorError) as error:
        raise ServiceNotAvailableError(f"{what}: the actor is not reachable now ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return the first line of Ray's message, which may be a page long."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
