"""Compares the gateway's messages with the official Python client's classes, in one process.

The program runs in the official client's environment, which has neither Ray nor the tests' packages. It prints a report
as JSON: the differences between the descriptors, and the number of compared messages.
"""

from __future__ import annotations

import json
import sys
import types
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from google.protobuf import unknown_fields

from raymq.gateway.wire.messages import CLASSES
from tests.support.gateway.random_messages import fill


def official() -> tuple[Any, ...]:
    """Return the modules of the official client's messages. The packages' own code starts the whole client, which needs
    more packages, so bare packages take their places."""
    found = find_spec("rocketmq")
    assert found is not None
    for name, folder in (("rocketmq", ""), ("rocketmq.grpc_protocol", "grpc_protocol")):
        package = types.ModuleType(name)
        package.__path__ = [str(Path(one) / folder) for one in found.submodule_search_locations or ()]
        sys.modules[name] = package
    return tuple(import_module(f"rocketmq.grpc_protocol.{name}_pb2") for name in ("definition", "service"))


def signature(field: Any) -> list[Any]:
    """Return all that decides how a field is sent: number, type, type's name, presence and group."""
    kind = field.message_type or field.enum_type
    group = field.containing_oneof.name if field.containing_oneof else ""
    return [field.number, field.type, field.is_repeated, kind.full_name if kind else "", field.has_presence, group]


def enums_of(holder: Any) -> dict[str, dict[str, int]]:
    return {name: {one.name: one.number for one in enum.values} for name, enum in holder.enum_types_by_name.items()}


def differences(modules: tuple[Any, ...]) -> list[str]:
    """Return each difference between the table's descriptors and the official descriptors."""
    found, theirs = [], {}
    for module in modules:
        theirs |= module.DESCRIPTOR.message_types_by_name
    ours = next(iter(CLASSES.values())).DESCRIPTOR.file
    found += [f"message {name}" for name in sorted(theirs.keys() ^ ours.message_types_by_name.keys())]
    for name, message in theirs.items():
        mine = {one.name: signature(one) for one in ours.message_types_by_name[name].fields}
        them = {one.name: signature(one) for one in message.fields}
        found += [f"field {name}.{one}" for one in {**mine, **them} if mine.get(one) != them.get(one)]
        if enums_of(ours.message_types_by_name[name]) != enums_of(message):
            found.append(f"enumerations in {name}")
    official_enums = {name: values for module in modules for name, values in enums_of(module.DESCRIPTOR).items()}
    for name in {**enums_of(ours), **official_enums}:
        one, other = enums_of(ours).get(name, {}), official_enums.get(name, {})
        found += [f"value {name}.{word}" for word in {**one, **other} if one.get(word) != other.get(word)]
    return found


def unknown(message: Any) -> bool:
    """Return whether a message, or a message in it, has fields that its class does not know."""
    if len(unknown_fields.UnknownFieldSet(message)):
        return True
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            continue
        if any(unknown(one) for one in (value if field.is_repeated else [value])):
            return True
    return False


def crosses(source: Any, target: Any, known: bool) -> bool:
    """Return whether bytes of `source` parse as `target` and back without a loss. `known`: no field of the source may
    be unknown to the target."""
    raw = source.SerializeToString(deterministic=True)
    parsed = type(target).FromString(raw)
    if known and unknown(parsed):
        return False
    return bool(type(source).FromString(parsed.SerializeToString()) == source)


def main(seed: int, rounds: int) -> None:
    modules = official()
    rng, compared, lost = Random(seed), 0, []
    for module in modules:
        for name, message in module.DESCRIPTOR.message_types_by_name.items():
            theirs = getattr(module, message.name)
            for _ in range(rounds):
                compared += 1
                if not crosses(fill(theirs(), rng), CLASSES[name](), known=True):
                    lost.append(f"from the official {name}")
                # the table is newer than this client: its additions are unknown fields there, and come back
                if not crosses(fill(CLASSES[name](), rng), theirs(), known=False):
                    lost.append(f"to the official {name}")
    print(json.dumps({"differences": differences(modules), "compared": compared, "lost": sorted(set(lost))}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
