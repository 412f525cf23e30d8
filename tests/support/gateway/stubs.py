"""Writes raymq/gateway/wire/messages.pyi, the types of the gateway's messages, from the table of their fields.

`python -m tests.support.gateway.stubs` writes the file. A test compares the file with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raymq.gateway.wire.enums import ENUMS
from raymq.gateway.wire.table import MESSAGES, FieldKind, FieldSpec, MessageSpec

STUB = Path(__file__).parents[3] / "raymq/gateway/wire/messages.pyi"
HEAD = '''"""Types of the classes in messages.py. Written by `python -m tests.support.gateway.stubs`: do not edit it."""

from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, Literal, Self, TypeVar, overload

_T = TypeVar("_T", bound="_Message")

class DecodeError(Exception): ...

class _Message:
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...
    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...
    def ByteSize(self) -> int: ...
    def CopyFrom(self, other: Self) -> None: ...
    def DiscardUnknownFields(self) -> None: ...

class _Messages(Sequence[_T]):
    @overload
    def __getitem__(self, index: int) -> _T: ...
    @overload
    def __getitem__(self, index: slice) -> list[_T]: ...
    def __len__(self) -> int: ...
    def add(self, **fields: Any) -> _T: ...
    def append(self, message: _T) -> None: ...
    def extend(self, messages: Iterable[_T]) -> None: ...

class Timestamp(_Message):
    seconds: int
    nanos: int
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...

class Duration(_Message):
    seconds: int
    nanos: int
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...

CLASSES: dict[str, Any]
'''
SCALARS = {"i32": "int", "i64": "int", "float": "float", "bool": "bool", "str": "str", "bytes": "bytes"}
NUMBERS = {*(enum.__name__ for enum in ENUMS), "Policy"}


def value_type(name: str) -> str:
    """Return the Python type of a field's value. An enumeration's value is an int, because it may have no name."""
    return "int" if name in NUMBERS else SCALARS.get(name, name)


def is_message(field: FieldSpec) -> bool:
    return field.type not in SCALARS and field.type not in NUMBERS


def argument(field: FieldSpec) -> str:
    kind = value_type(field.type)
    if field.kind is FieldKind.LIST:
        return f"{field.name}: Iterable[{kind}] = ..."
    if field.kind is FieldKind.MAP:
        return f"{field.name}: Mapping[str, {kind}] = ..."
    return f"{field.name}: {kind} | None = ..."


def attribute(field: FieldSpec) -> Iterator[str]:
    kind = value_type(field.type)
    if field.kind is FieldKind.LIST:
        kind = f"_Messages[{kind}]" if is_message(field) else f"MutableSequence[{kind}]"
    elif field.kind is FieldKind.MAP:
        kind = f"MutableMapping[str, {kind}]"
    elif not is_message(field):
        yield f"    {field.name}: {kind}"
        return
    yield "    @property"
    yield f"    def {field.name}(self) -> {kind}: ..."


def literal(names: list[str]) -> str:
    return f"Literal[{', '.join(map(repr, names))}]"


def has_presence(field: FieldSpec) -> bool:
    if field.kind in (FieldKind.LIST, FieldKind.MAP):
        return False
    return field.kind is not FieldKind.SINGLE or is_message(field)


def message_class(message: MessageSpec) -> Iterator[str]:
    yield f"class {message.name}(_Message):"
    for field in message.fields:
        yield from attribute(field)
    yield f"    def __init__(self, *, {', '.join(map(argument, message.fields))}) -> None: ..."
    present = [field.name for field in message.fields if has_presence(field)]
    if present:
        yield f"    def HasField(self, name: {literal(present)}) -> bool: ..."
    every = [field.name for field in message.fields]
    yield f"    def ClearField(self, name: {literal(every)}) -> None: ..."
    if message.group:
        group = [field.name for field in message.fields if field.kind is FieldKind.ONE_OF]
        yield f"    def WhichOneof(self, name: {literal([message.group])}) -> {literal(group)} | None: ..."


def stub() -> str:
    """Return the text of the stub file, before it is formatted."""
    return HEAD + "\n".join(line for message in MESSAGES for line in ("", *message_class(message))) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub())
