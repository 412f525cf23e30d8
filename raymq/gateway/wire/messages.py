"""Classes of RocketMQ 5's gRPC messages, made at import from the table of their fields.

The descriptors are in a pool of their own, so that the official Python client, which registers messages of the same
names, can run in the same process. A message keeps fields that it does not know: when it is serialized again, their
bytes are in it. The types of the classes are in messages.pyi.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from raymq.gateway.wire.enums import ENUMS, Policy
from raymq.gateway.wire.table import MESSAGES, PACKAGE, FieldKind, FieldSpec, MessageSpec

if TYPE_CHECKING:
    from enum import IntEnum

_FILE: Final = "raymq/gateway.proto"
_SCALARS: Final = {
    "i32": FieldDescriptorProto.TYPE_INT32,
    "i64": FieldDescriptorProto.TYPE_INT64,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "str": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
}
_TIMES: Final = ("Timestamp", "Duration")
_ENUM_NAMES: Final = frozenset(enum.__name__ for enum in ENUMS)


def _add_enum(enum: EnumDescriptorProto, values: type[IntEnum]) -> None:
    for one in values:
        enum.value.add(name=one.name, number=one.value)


def _set_type(field: FieldDescriptorProto, owner: DescriptorProto, type_name: str) -> None:
    """Set the type of `field` in the message `owner`. A type that is neither a scalar nor an enumeration is a
    message."""
    if type_name in _SCALARS:
        field.type = _SCALARS[type_name]
        return
    if type_name == Policy.__name__:
        _add_enum(owner.enum_type.add(name=type_name), Policy)
        field.type, field.type_name = FieldDescriptorProto.TYPE_ENUM, f".{PACKAGE}.{owner.name}.{type_name}"
        return
    package = "google.protobuf" if type_name in _TIMES else PACKAGE
    is_enum = type_name in _ENUM_NAMES
    field.type = FieldDescriptorProto.TYPE_ENUM if is_enum else FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{package}.{type_name}"


def _add_map(owner: DescriptorProto, field: FieldDescriptorProto, value_type: str) -> None:
    """Make `field` a map from text. In descriptors a map is a list of entries, whose message has a fixed name."""
    name = "".join(word.capitalize() for word in field.name.split("_")) + "Entry"
    entry = owner.nested_type.add(name=name)
    entry.options.map_entry = True
    entry.field.add(
        name="key", number=1, type=FieldDescriptorProto.TYPE_STRING, label=FieldDescriptorProto.LABEL_OPTIONAL
    )
    value = entry.field.add(name="value", number=2, label=FieldDescriptorProto.LABEL_OPTIONAL)
    _set_type(value, entry, value_type)
    field.label = FieldDescriptorProto.LABEL_REPEATED
    field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{PACKAGE}.{owner.name}.{name}"


def _add_field(message: DescriptorProto, spec: FieldSpec) -> FieldDescriptorProto:
    field = message.field.add(name=spec.name, number=spec.number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if spec.kind is FieldKind.MAP:
        _add_map(message, field, spec.type)
        return field
    if spec.kind is FieldKind.LIST:
        field.label = FieldDescriptorProto.LABEL_REPEATED
    _set_type(field, message, spec.type)
    return field


def _add_message(file: FileDescriptorProto, spec: MessageSpec) -> None:
    message = file.message_type.add(name=spec.name)
    if spec.group:
        message.oneof_decl.add(name=spec.group)
    for one in spec.fields:
        field = _add_field(message, one)
        if one.kind is FieldKind.ONE_OF:
            field.oneof_index = 0
        elif one.kind is FieldKind.OPTIONAL:
            # in descriptors, presence is a group of one field
            field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{one.name}")


def _file() -> FileDescriptorProto:
    times = [timestamp_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name]
    file = FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="proto3", dependency=times)
    for enum in ENUMS:
        _add_enum(file.enum_type.add(name=enum.__name__), enum)
    for message in MESSAGES:
        _add_message(file, message)
    return file


def _classes() -> dict[str, Any]:
    """Return the class of each message, by name."""
    pool = DescriptorPool()
    for times in (timestamp_pb2, duration_pb2):
        pool.AddSerializedFile(times.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(_file().SerializeToString())
    names = {spec.name: f"{PACKAGE}.{spec.name}" for spec in MESSAGES}
    names |= {name: f"google.protobuf.{name}" for name in _TIMES}
    return {name: GetMessageClass(pool.FindMessageTypeByName(full)) for name, full in names.items()}


CLASSES: Final[dict[str, Any]] = _classes()
"""The class of each message, by name. Each class is also a name of this module."""
globals().update(CLASSES)

__all__ = ["CLASSES", "DecodeError", *CLASSES]  # noqa: PLE0604  # the names of the table
