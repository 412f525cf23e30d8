"""Calls to Ray actors. No other client module calls actors. `raymq_errors` converts each error of Ray's own into an
error of raymq, whose `__cause__` is Ray's error. So no caller gets a RayError.

If the process acts as a user (raymq.common.identity), a call is signed and uses the signed variant of the method. Every
call has a timeout. A call that Ray reports as failed may have run. So a failure means only that no answer arrived, and
the caller decides if the call is safe to repeat.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import ray
from ray import cloudpickle
from ray.actor import ActorHandle
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
    RuntimeEnvSetupError,
)
from ray.util.annotations import RayDeprecationWarning

from raymq.common import identity
from raymq.common.errors import RaymqError, RequestTimeoutError, ServiceNotAvailableError, SignedTooEarlyError
from raymq.common.identity import Identity
from raymq.common.names import NAMESPACE, NameServerName
from raymq.remoting.access.signatures import NONCE_BYTES, Signature, sign

NAME_SERVERS_MAX: Final = 3
"""Maximum number of NameServers in a cluster."""
DEFAULT_TIMEOUT_S = 10.0
"""Timeout in seconds of an actor call whose caller gives no timeout."""
SIGN_AGAIN_S: Final = 0.05
"""Pause in seconds before a call is signed for the third time. A restarted actor refuses old signatures. So if an actor
restarts repeatedly, a client without this pause would sign the call again and again in a busy loop."""
CLOCKS_MAX: Final = 10_000
"""Maximum number of actors whose clocks a client stores. If there are more, the client drops all stored clocks and
requests them again."""
REASON_CHARS_MAX: Final = 200
"""Maximum number of characters of a Ray error's message in an error of raymq. Ray's message may be a page long."""
DEAD_FOR_GOOD: Final = (ActorDiedError, ActorUnschedulableError, RuntimeEnvSetupError)
"""Errors of Ray that mean that an actor has died permanently: also an actor whose node no longer exists, or whose
runtime_env cannot be set up."""

_clocks: Final[dict[str, tuple[bytes, int]]] = {}
"""For each actor's name: the id of the actor's process, and the number of ms by which its clock is ahead of this
process's clock."""

logger = logging.getLogger(__name__)


def find_actor(name: str, namespace: str | None = NAMESPACE) -> Any:
    """Return the Ray handle of the actor with this name; None if no such actor runs. `namespace`: a namespace of Ray,
    by default raymq's own; None for this process's namespace. Raises ServiceNotAvailableError if Ray does not
    answer, or if this process is not connected to Ray."""
    if not ray.is_initialized():
        raise _not_connected(f"actor {name!r} was not looked up")  # Ray would start a new cluster for the lookup
    with raymq_errors(f"the lookup of actor {name!r}"):
        try:
            return ray.get_actor(name, namespace=namespace)
        except ValueError:
            return None


def running_nameservers() -> list[NameServerName]:
    """Return the names of the NameServers that run in the Ray cluster of this process. Raises ServiceNotAvailableError
    if Ray does not answer."""
    return [name for name in map(NameServerName, range(NAME_SERVERS_MAX)) if find_actor(str(name)) is not None]


def was_restarted() -> bool:
    """Return True if Ray has restarted the actor that this process runs.

    Ray's property calls a deprecated method of Ray. Without the filter, Ray's warning about it appears among the lines
    that a listener prints for its user.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RayDeprecationWarning)
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)


class ActorRef:
    """A reference to a named raymq actor. It looks up the actor at the first call, and again after the actor has died
    permanently.

    Thread-safe. The handle stays valid when Ray restarts the actor. ActorRef drops the handle only if Ray reports the
    actor as dead, because another actor may have taken the name.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._handle: Any = None

    def handle(self) -> Any:
        """Return the actor's Ray handle. Raises ServiceNotAvailableError if no actor has this name, or if Ray does not
        answer."""
        with self._lock:
            if self._handle is None:
                self._handle = find_actor(self.name)
            if self._handle is None:
                raise ServiceNotAvailableError(
                    f"actor {self.name!r} does not run in this Ray cluster; see `raymq status`, or start "
                    "raymq with `raymq up`"
                )
            return self._handle

    def drop_handle(self) -> None:
        """Drop the actor's Ray handle, so that the next call looks up the actor's name again."""
        with self._lock:
            self._handle = None

    def call(self, method: str, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S, **kwargs: Any) -> Any:
        """Call a method of the actor and wait for its result.

        Raises the method's error if it is a RaymqError. Raises RequestTimeoutError if no answer arrives in time, and
        ServiceNotAvailableError if the actor is dead, restarting or unreachable, or if Ray cannot return the answer.
        After one of these two errors, the call may have run.
        """
        try:
            return _call(lambda: self.start(method, *args, **kwargs), f"{self.name}.{method}", timeout_s)
        except ActorGoneError:
            self.drop_handle()
            raise

    def start(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Start a call to the actor without waiting, and return Ray's reference to the result.

        The call is signed if this process acts as a user. Raises ServiceNotAvailableError if no actor has this name, or
        if Ray does not start the call.
        """
        return _start(self.handle(), self.name, identity.present(), method, args, kwargs)

    def tell(self, method: str, *args: Any) -> None:
        """Call a method of the actor, and ignore its result and its failure. If the actor requires a new signature, the
        call is signed again and repeated once.

        Raises ServiceNotAvailableError if no actor has this name, or if Ray does not start the call.
        """

        def sign_anew(answer: Any) -> None:
            failure = answer.exception()
            if isinstance(failure, RayTaskError) and isinstance(failure.cause, SignedTooEarlyError):
                _learn(failure.cause)
                try:
                    self.start(method, *args)
                except RaymqError as error:
                    logger.info("the call %s.%s was not sent: %s", self.name, method, error)

        started = self.start(method, *args)
        if identity.present() is not None:
            started.future().add_done_callback(sign_anew)


class HandleRef:
    """A reference to an actor in another namespace (a Listener or a PredicateRunner), by its handle. Thread-safe.

    Signatures contain the actor's `name`. Calls are signed as the user `who`, or unsigned if `who` is None.
    """

    def __init__(self, name: str, handle: Any, who: Identity | None) -> None:
        self.name, self.handle, self._who = name, handle, who

    def call(self, method: str, *args: Any, what: str = "", timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
        """Call a method of the actor and wait for its result. Raises like `ActorRef.call`. `what`: the call's name in
        error texts."""
        return _call(lambda: self.start(method, *args), what or f"{self.name}.{method}", timeout_s)

    def start(self, method: str, *args: Any) -> Any:
        """Start a call to the actor without waiting, and return Ray's reference to the result. Raises
        ServiceNotAvailableError if Ray does not start the call."""
        return _start(self.handle, self.name, self._who, method, args, {})


def _start(
    handle: Any, actor: str, who: Identity | None, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Start a call to an actor. If `who` is given, the call is signed as this user and uses the signed variant of the
    method."""
    if isinstance(handle, ActorHandle) and not ray.is_initialized():
        raise _not_connected(f"{actor}.{method} was not called")  # Ray would start a new cluster for the call
    with raymq_errors(f"{actor}.{method}"):
        if who is None:
            return _method(handle, actor, method).remote(*args, **kwargs)
        signature, payload = _signed(who, actor, method, args, kwargs)
        return _method(handle, actor, identity.SIGNED + method).remote(signature, payload)


def _not_connected(what: str) -> ServiceNotAvailableError:
    """Return the error for a process that called `ray.shutdown()` before it closed its clients. `what`: what was not
    done."""
    return ServiceNotAvailableError(
        f"{what}, because this process is no longer connected to Ray: close clients before ray.shutdown(), and call "
        "raymq.connect() after ray.init()"
    )


def _method(handle: Any, actor: str, name: str) -> Any:
    """Return a method of an actor's handle. Raises ActorMethodMissingError if the actor does not have the method."""
    try:
        return getattr(handle, name)
    except AttributeError:
        raise ActorMethodMissingError(
            f"actor {actor!r} has no method {name!r}, because it runs another version of raymq; run the same version "
            "in all processes of the cluster"
        ) from None


def _call(start: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """Start a call to an actor and wait for its result. If the actor requires a new signature, sign and start the call
    again until the timeout.

    A signature names the process incarnation of the actor. If it names no incarnation, or not the present one, the
    actor refuses the call, which then does not run.
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
    """Return a call's signature, and the serialized arguments that the signature covers."""
    # Ray resolves object references only if they are top-level arguments of a call. In a signed call they would be
    # inside the serialized arguments, so resolve them first.
    values = [ray.get(one, timeout=DEFAULT_TIMEOUT_S) if isinstance(one, ray.ObjectRef) else one for one in args]
    payload = cloudpickle.dumps((values, kwargs))
    life, ahead_ms = _clocks.get(actor, (b"", 0))
    now_ms = time.monotonic_ns() // 1_000_000 + ahead_ms
    return sign(who.user, who.key, actor, method, payload, life, now_ms, secrets.token_bytes(NONCE_BYTES)), payload


def _learn(error: SignedTooEarlyError) -> None:
    """Store the id and the clock of an actor's process for later signatures. The actor sent them in its refusal of a
    call."""
    if len(_clocks) >= CLOCKS_MAX:
        _clocks.clear()
    _clocks[error.actor] = error.life, error.now_ms - time.monotonic_ns() // 1_000_000


class ActorGoneError(ServiceNotAvailableError):
    """Raised if the actor died permanently. Another actor may take its name."""


class ActorMethodMissingError(ServiceNotAvailableError):
    """Raised if an actor does not have the called method, because it runs another version of raymq. Nothing was
    called."""

    retryable: ClassVar[bool] = False


class ActorNotSetUpError(ActorGoneError):
    """Raised if an actor never starts, because Ray cannot set up its runtime_env. The same runtime_env fails again."""

    retryable: ClassVar[bool] = False


def resolve(reference: Any, what: str, timeout_s: float) -> Any:
    """Wait up to `timeout_s` for a call's result with `ray.get`, and convert Ray's errors into raymq's errors. `what`:
    the call's name in error texts.

    Raises like `ActorRef.call`, and ActorGoneError if the actor died permanently.
    """
    with raymq_errors(what):
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


@contextmanager
def raymq_errors(what: str) -> Iterator[None]:
    """Convert each error of Ray that the block raises into a ServiceNotAvailableError. Its `__cause__` is Ray's error.
    `what`: what the block does, for the error's text.

    Raises ActorGoneError if Ray reports that an actor died permanently, and ActorNotSetUpError if the actor's
    runtime_env cannot be set up.
    """
    try:
        yield
    except RuntimeEnvSetupError as error:
        raise ActorNotSetUpError(
            f"{what} failed, because Ray cannot set up the actor's runtime_env ({_reason(error)}); correct the "
            "runtime_env"
        ) from error
    except DEAD_FOR_GOOD as error:
        raise ActorGoneError(
            f"{what} failed, because its actor is dead ({_reason(error)}); see `raymq status`"
        ) from error
    except RayActorError as error:
        raise ServiceNotAvailableError(
            f"{what} failed, because its actor is not reachable now ({_reason(error)})"
        ) from error
    except RayError as error:  # for example, a node failed with the only copy of the answer, or Ray itself is down
        raise ServiceNotAvailableError(
            f"{what} failed in Ray: {type(error).__name__} ({_reason(error)}); see `raymq status`"
        ) from error


def _reason(error: Exception) -> str:
    """Return the start of a Ray error's message, on one line: the first line, or the reason why a runtime_env cannot be
    set up, which begins after the first line."""
    if isinstance(error, RuntimeEnvSetupError):
        lines = (error.error_message or "").split()
        return " ".join(lines)[:REASON_CHARS_MAX] or type(error).__name__
    lines = str(error).strip().splitlines()
    return lines[0][:REASON_CHARS_MAX] if lines else type(error).__name__
