"""Predicate is a function of the user's that says which messages of a topic a consumer wants.

It is Python's form of RocketMQ's class filter (spec/features.md §3.2): there the client uploads a Java source, and
processes beside each broker compile and call it. Here the function goes, pickled by value, to a process of its own on
the node of each storage actor that the consumer reads from (raymq.client.predicates.runner).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

from raymq.client.predicates.fingerprint import fingerprint
from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageExt
from raymq.common.numbers import NumberRange, bounded, checked
from raymq.common.shipping import deferred_kind, dumps_by_value

OnError = Literal["raise", "match", "skip"]
PREDICATE_TIMEOUT_S: Final = 5.0
PREDICATE_TIMEOUT_MAX_S: Final = 300.0
NAME_MAX: Final = 100


class Predicate:
    """A function that gets a message and says if it is wanted. Made by `raymq.predicate`; immutable.

    Two are equal if they have the same bytes and options. A pickled Predicate carries the function's bytes, and does
    not load it: only a predicate's own process does.
    """

    __slots__ = ("function", "name", "on_error", "payload", "runtime_env", "text", "timeout_s")

    def __init__(
        self,
        payload: bytes,
        *,
        name: str,
        text: str,
        on_error: OnError,
        timeout_s: float,
        runtime_env: Mapping[str, Any] | None,
        function: Callable[[MessageExt], object] | None = None,
    ) -> None:
        self.payload = payload
        """The function, as cloudpickle's bytes."""
        self.name = name
        self.text = text
        """The subscription's expression: all members of a group have the same."""
        self.on_error: OnError = on_error
        self.timeout_s = timeout_s
        self.runtime_env = None if runtime_env is None else dict(runtime_env)
        self.function = function
        """The function itself; None in other processes than the one that made the predicate."""

    @property
    def key(self) -> str:
        """Hexadecimal digits that tell predicates apart by their bytes and options."""
        options = repr((self.on_error, self.timeout_s, sorted((self.runtime_env or {}).items(), key=repr)))
        return hashlib.sha256(self.payload + options.encode()).hexdigest()[:16]

    def in_environment(self, runtime_env: Mapping[str, Any] | None) -> Predicate:
        """This predicate, with Ray's `runtime_env` if it has none of its own."""
        if runtime_env is None or self.runtime_env is not None:
            return self
        return Predicate(
            self.payload,
            name=self.name,
            text=self.text,
            on_error=self.on_error,
            timeout_s=self.timeout_s,
            runtime_env=runtime_env,
            function=self.function,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Predicate) and (self.text, self.key) == (other.text, other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.payload, self.name, self.text, self.on_error, self.timeout_s, self.runtime_env)
        return _without_function, fields

    def __repr__(self) -> str:
        return f"<{self.text}>"


@checked
@bounded(timeout_s=NumberRange(0.1, PREDICATE_TIMEOUT_MAX_S))
def predicate(
    function: Callable[[MessageExt], object],
    *,
    name: str | None = None,
    on_error: OnError = "raise",
    timeout_s: float = PREDICATE_TIMEOUT_S,
    runtime_env: Mapping[str, Any] | None = None,
) -> Predicate:
    """A filter for `consumer.subscribe(topic, …)`: a message is wanted if `function(message)` is true.

    The function runs beside the messages, in a process of its own on each storage node; on a node that also runs the
    pull consumer, in the consumer's process. It is shipped by value and may read every field of the message; a field
    that it does not read is not decoded. It must depend on the message alone, because it may be called again for the
    same one.

    `name` (default: the function's) and a fingerprint of its code are the subscription's expression, which all members
    of a group share. `on_error` says what happens to a message on which it raises, hangs for longer than `timeout_s`
    (0.1 to 300 s), or ends its process: "raise" stops its queue and raises PredicateFailedError from `poll`, "match"
    delivers the message, "skip" leaves it out. `runtime_env` is Ray's, for the function's process.

    InvalidArgumentError for a function that cannot be called or pickled, and for options outside these.
    """
    given = name if name is not None else getattr(function, "__qualname__", type(function).__qualname__)
    if not callable(function):
        raise InvalidArgumentError(f"a predicate must be callable with one message, {given} object is not")
    if kind := deferred_kind(function):
        raise InvalidArgumentError(f"predicate {given} is {kind}, whose calls are always true: give a plain function")
    if not isinstance(given, str) or not given or len(given) > NAME_MAX or not given.isprintable():
        raise InvalidArgumentError(f"a predicate's name is 1 to {NAME_MAX} printable characters, not {given!r}")
    if on_error not in get_args(OnError):
        raise InvalidArgumentError(f'on_error is "raise", "match" or "skip", not {on_error!r}')
    payload = dumps_by_value(
        function,
        lambda error: InvalidArgumentError(
            f"predicate {given} cannot be shipped to its process: {error}. It must not hold locks, open files, "
            "connections or a raymq client"
        ),
    )
    return Predicate(
        payload,
        name=given,
        text=f"predicate {given} {fingerprint(function)}",
        on_error=on_error,
        timeout_s=float(timeout_s),
        runtime_env=runtime_env,
        function=function,
    )


def _without_function(
    payload: bytes, name: str, text: str, on_error: OnError, timeout_s: float, runtime_env: Mapping[str, Any] | None
) -> Predicate:
    return Predicate(payload, name=name, text=text, on_error=on_error, timeout_s=timeout_s, runtime_env=runtime_env)
