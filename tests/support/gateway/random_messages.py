"""Random messages of protobuf: every field of a message is set, with values at the edges of its type."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

DEPTH_MAX = 6
TEXTS = ("", "a", "orders", "ä€𝄞", "\x00\x01", "x" * 300)
INTEGERS = (0, 1, -1, 127, 128, 2**31 - 1, -(2**31))
LONGS = (*INTEGERS, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.5, 2.0, float("inf"), 2.0**-149)


def random_scalar(field: FieldDescriptor, rng: Random) -> Any:
    """Return a random value of a field that is no message. An enumeration's value may have no name."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(TEXTS)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.randbytes(rng.choice((0, 1, 100, 5000)))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return rng.choice(FLOATS)
    if field.type == FieldDescriptor.TYPE_INT64:
        return rng.choice(LONGS) if rng.random() < 0.5 else rng.randrange(-(2**63), 2**63)
    if field.type == FieldDescriptor.TYPE_ENUM and rng.random() < 0.7:
        return rng.choice(field.enum_type.values).number
    return rng.choice(INTEGERS)


def fill(message: Any, rng: Random, depth: int = 0) -> Any:
    """Set every field of `message` and of the messages in it, and return the message. Of the fields that exclude each
    other, the last field that is set stays: the order of fields is random."""
    descriptor: Descriptor = message.DESCRIPTOR
    fields = list(descriptor.fields)
    rng.shuffle(fields)
    for field in fields:
        _fill_field(message, field, rng, depth)
    return message


def _fill_field(message: Any, field: FieldDescriptor, rng: Random, depth: int) -> None:
    value = getattr(message, field.name)
    if field.type != FieldDescriptor.TYPE_MESSAGE:
        if field.is_repeated:
            value.extend(random_scalar(field, rng) for _ in range(rng.randrange(1, 4)))
        else:
            setattr(message, field.name, random_scalar(field, rng))
    elif field.message_type.GetOptions().map_entry:
        for _ in range(rng.randrange(1, 4)):
            value[rng.choice(TEXTS)] = rng.choice(TEXTS)
    elif depth == DEPTH_MAX:
        return
    elif field.is_repeated:
        for _ in range(rng.randrange(1, 4)):
            fill(value.add(), rng, depth + 1)
    else:
        value.SetInParent()
        fill(value, rng, depth + 1)
