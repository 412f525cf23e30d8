"""Predicate is a user's function that selects the messages of a topic that a consumer wants.

A predicate is Python's form of RocketMQ's class filter (spec/features.md §3.2). In RocketMQ the client uploads a Java
source, and processes beside each broker compile and call it. In raymq the function is pickled by value. It runs in a
separate process on the node of each storage actor from which the consumer reads (raymq.client.predicates.runner).

Two functions with the same code have the same fingerprint, whatever their module and process. Pickles do not show
whether two members of a group use the same predicate: two pickles of one function differ by the path of its file and by
the order of sets.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, Literal, get_args

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MessageExt
from raymq.common.numbers import NumberRange, bounded, checked
from raymq.common.shipping import deferred_kind, dumps_by_value

OnError = Literal["raise", "match", "skip"]
PREDICATE_TIMEOUT_S: Final = 5.0
PREDICATE_TIMEOUT_MAX_S: Final = 300.0
NAME_MAX: Final = 100


class Predicate:
    """A function that receives a message and returns whether the message is wanted. Created by `raymq.predicate`;
    immutable.

    Two predicates are equal if they have the same bytes and options. A pickled Predicate carries the function's bytes;
    only the predicate's own process loads the function from them.
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
        """The predicate function, pickled by cloudpickle."""
        self.name = name
        self.text = text
        """The subscription expression of the predicate. All members of a group must use the same expression."""
        self.on_error: OnError = on_error
        self.timeout_s = timeout_s
        self.runtime_env = None if runtime_env is None else dict(runtime_env)
        self.function = function
        """The predicate's function; None in all processes except the process that created the predicate."""

    @property
    def key(self) -> str:
        """Hexadecimal digits that identify this predicate: a hash of its bytes and options."""
        options = repr((self.on_error, self.timeout_s, sorted((self.runtime_env or {}).items(), key=repr)))
        return hashlib.sha256(self.payload + options.encode()).hexdigest()[:16]

    def in_environment(self, runtime_env: Mapping[str, Any] | None) -> Predicate:
        """Return this predicate with Ray's `runtime_env`, unless the predicate has its own runtime_env."""
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
    """Create a filter for `consumer.subscribe(topic, …)`: a message is wanted if `function(message)` is true.

    The function runs in a separate process on each storage node, next to the messages. On a node that also runs the
    pull consumer, the function runs in the consumer's process. The function is pickled by value and may read every
    field of the message; fields that it does not read are not decoded. It must depend on the message alone, because it
    may be called again for the same message.

    `name` (default: the function's name) and a fingerprint of the function's code are the subscription's expression,
    which must be the same for all members of a group. `on_error` says what happens to a message on which the function
    raises, hangs for longer than `timeout_s` (0.1 to 300 s), or ends its process: "raise" stops the queue and raises
    PredicateFailedError from `poll`, "match" delivers the message, "skip" excludes the message. `runtime_env` is Ray's
    option, for the function's process.

    Raises InvalidArgumentError if the function cannot be called or pickled, or if an option is invalid.
    """
    given = name if name is not None else getattr(function, "__qualname__", type(function).__qualname__)
    if not callable(function):
        raise InvalidArgumentError(f"a predicate must be callable with one message, but {given} is not callable")
    if kind := deferred_kind(function):
        raise InvalidArgumentError(
            f"predicate {given} is {kind}, whose result always counts as true: pass a plain function"
        )
    if not isinstance(given, str) or not given or len(given) > NAME_MAX or not given.isprintable():
        raise InvalidArgumentError(f"a predicate's name must have 1 to {NAME_MAX} printable characters, not {given!r}")
    if on_error not in get_args(OnError):
        raise InvalidArgumentError(f'on_error must be "raise", "match" or "skip", not {on_error!r}')
    payload = dumps_by_value(
        function,
        lambda error: InvalidArgumentError(
            f"predicate {given} cannot be pickled for its process: {error}. Do not store locks, open files, "
            "connections or a raymq client in it"
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


DIGITS: Final = 12
_DEPTH_MAX: Final = 16
"""Maximum depth to which the fingerprint of a predicate includes nested values. Of values that are nested more deeply,
it includes only the types."""

_EMPTY_CELL: Final = CellType()


def fingerprint(function: Any) -> str:
    """Return hexadecimal digits that identify the behaviour of a function. They are computed from the function's code,
    constants and defaults, and from the values and functions of the program that it uses. Of other objects that it
    uses, only the types are included."""
    digest = hashlib.sha256()
    for part in _parts(function, frozenset()):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\x00")
    return digest.hexdigest()[:DIGITS]


def _parts(value: Any, around: frozenset[int]) -> Iterator[str]:
    """Yield the texts that describe `value` in a fingerprint. `around`: the ids of the values that contain `value`, to
    detect cycles."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
        return
    yield type(value).__qualname__
    if len(around) < _DEPTH_MAX and id(value) not in around:
        for part in _members(value):
            yield from _parts(part, around | {id(value)})


def _members(value: Any) -> Iterator[Any]:
    """Yield the objects that make up a Python object, for example a function's code, defaults and global variables. The
    predicate's fingerprint is computed from them."""
    if isinstance(value, FunctionType):
        yield from (value.__code__, value.__defaults__, value.__kwdefaults__)
        yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY_CELL)
        yield from (value.__globals__[name] for name in sorted(_names(value.__code__)) if name in value.__globals__)
    elif isinstance(value, CodeType):
        yield from (value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_flags)
        yield from value.co_consts
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, type | ModuleType | BuiltinFunctionType):
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    elif isinstance(value, set | frozenset):
        yield from sorted(value, key=repr)
    elif isinstance(value, dict):
        yield from (part for item in value.items() for part in item)
    elif isinstance(value, list | tuple):
        yield from value
    elif hasattr(value, "__dict__"):
        yield from (vars(value), vars(type(value)).get("__call__"))


def _names(code: CodeType) -> set[str]:
    """Return the names that a code object, and the code objects inside it, may look up in their module."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
