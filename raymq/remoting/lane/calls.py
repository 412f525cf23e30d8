"""Control calls over a lane (direct socket connection). A call has a method name and msgpack arguments, and returns a
msgpack result. The method's annotations give the types.

    payload   | length of the name 1 | name | msgpack of the list of arguments |
    answer    | msgpack of the result |

Arguments and results may have the types that msgspec supports: numbers, texts, bytes, lists, dicts, dataclasses,
NamedTuples, enums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any, Final, get_type_hints

import msgspec

from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError
from raymq.remoting.lane.connection import LaneRequest
from raymq.remoting.lane.frames import Buffer

Submit = Callable[[str, Callable[[], None], Callable[[RaymqError], None]], object]
"""Type of a function that runs a method call now or later, in any thread. Its arguments are the method's name, a
function that makes the call, and a function that receives an error. If the method call is refused, the error is either
passed to the third argument or raised."""

Guard = Callable[[LaneRequest, str, Sequence[Any]], None]
"""A function that raises an error unless the user of a request is allowed to call a method with the given arguments. It
runs in the thread of the server of lanes (direct socket connections), and must not block."""

_encoder: Final = msgspec.msgpack.Encoder()


def encode_call(method: str, arguments: Sequence[Any]) -> bytes:
    """Encode a method call as the payload of a frame. Raises TypeError if msgpack cannot encode an argument."""
    name = method.encode()
    return bytes([len(name)]) + name + _encoder.encode(list(arguments))


def decode_name(payload: memoryview) -> tuple[str, memoryview]:
    """Return the method name in a call's payload, and the rest of the payload. Raises InvalidArgumentError if the
    payload has no method name."""
    end = 1 + payload[0] if len(payload) else 0
    if not 0 < end <= len(payload):
        raise InvalidArgumentError("a control call names no method")
    return bytes(payload[1:end]).decode(errors="replace"), payload[end:]


def argument_types(method: Callable[..., Any], skip: int = 0) -> list[Any]:
    """Return the types of a method's arguments from its annotations, without the first `skip` arguments."""
    hints = get_type_hints(method)
    return [hints.get(name, Any) for name in list(signature(method).parameters)[skip:]]


class ArgumentReader:
    """Decodes the arguments of calls of one method. Trailing arguments with defaults may be missing."""

    def __init__(self, method: Callable[..., Any], skip: int = 0) -> None:
        """`skip`: number of leading arguments of the method that a call's payload does not contain."""
        self._types = argument_types(method, skip)

    def read(self, payload: Buffer) -> Sequence[Any]:
        """Decode the arguments in a call's payload. Raises InvalidArgumentError if the method does not accept
        them."""
        raw = msgspec.msgpack.decode(payload, type=list[msgspec.Raw])
        if len(raw) > len(self._types):
            raise InvalidArgumentError(f"the call has {len(raw)} arguments, not {len(self._types)}")
        return [msgspec.msgpack.decode(item, type=kind) for item, kind in zip(raw, self._types, strict=False)]


class ControlCalls:
    """A handler for LaneServer that calls methods by name.

    `submit` runs the `methods`, so these methods may block; their results are sent as the answers. The lane server's
    own thread calls the methods in `at_once`, with the request as the first argument. The `at_once` methods must not
    block, and answer the request themselves: `request.answer(encode_result(...))`.
    """

    def __init__(
        self,
        methods: Mapping[str, Callable[..., Any]],
        submit: Submit,
        at_once: Mapping[str, Callable[..., None]] | None = None,
        guard: Guard | None = None,
    ) -> None:
        """`guard`, if given, is called with the request, the method name and the arguments before each control call
        runs. It raises an error if the caller may not make the call."""
        self._submit, self._guard = submit, guard
        self._methods = {name: (method, ArgumentReader(method)) for name, method in methods.items()}
        self._at_once = {name: (method, ArgumentReader(method, 1)) for name, method in (at_once or {}).items()}

    def __call__(self, request: LaneRequest) -> None:
        """Decode a CALL request and run the method that it names."""
        name, payload = decode_name(request.payload)
        try:
            if name in self._at_once:
                method, reader = self._at_once[name]
                arguments = reader.read(payload)
                if self._guard is not None:
                    self._guard(request, name, arguments)
                method(request, *arguments)
                return
            if name not in self._methods:
                raise ServiceNotAvailableError(
                    f"the server has no control call {name!r}; use the same version of raymq on both ends"
                )
            method, reader = self._methods[name]
            arguments = reader.read(payload)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise InvalidArgumentError(f"cannot decode the arguments of control call {name!r}: {error}") from None
        if self._guard is not None:
            self._guard(request, name, arguments)
        self._submit(name, partial(_run, request, name, method, arguments), request.fail)


def _run(request: LaneRequest, name: str, method: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        request.answer(encode_result(method(*arguments)))
    except Exception as error:
        request.fail(request.told(error, name))


def encode_result(result: Any) -> bytes:
    """Encode a method's result as the payload of an answer. Raises TypeError if msgpack cannot encode the
    result."""
    return _encoder.encode(result)


def decode_result(payload: Buffer, kind: Any) -> Any:
    """Decode the result in an answer's payload as a value of type `kind`. Raises ServiceNotAvailableError if the
    payload does not fit the type."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise ServiceNotAvailableError(f"cannot decode the answer to a control call: {error}") from None
