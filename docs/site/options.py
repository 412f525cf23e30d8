"""Tables of the options of `connect`, producers and consumers, read from the code when the site is built.

A table has one row for each keyword argument: its type, unit, default and bounds. Types come from signatures and from
the TypedDicts behind `Unpack[…]`, defaults from the settings classes, and bounds from the ranges that the code checks.
"""

from __future__ import annotations

import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple

from raymq.client.client import Client, connect
from raymq.client.consumer.pull import settings as pull
from raymq.client.consumer.push import consumer as push, settings as push_settings
from raymq.client.consumer.simple import settings as simple
from raymq.client.producer import settings as producer
from raymq.common.numbers import LONGEST_TIME_S, TIME_MS, NumberRange
from raymq.common.protocol.membership import Allocation
from raymq.records.format.compression import Compression

CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "raymq.connect": connect,
    "raymq.Client.producer": Client.producer,
    "raymq.Client.transaction_producer": Client.transaction_producer,
    "raymq.Client.repeatable_writer": Client.repeatable_writer,
    "raymq.Client.pull_consumer": Client.pull_consumer,
    "raymq.Client.simple_consumer": Client.simple_consumer,
    "raymq.Client.push_consumer": Client.push_consumer,
}
"""The calls that have a table, by public name."""

UNITS: Final = {
    "_timestamp_ms": "ms since 1970",
    "now_ms": "ms since 1970",
    "_ms": "ms",
    "_s": "s",
    "_bytes": "bytes",
    "_mib": "MiB",
}
"""Units of numbers, by the end of the option's name. The first matching end counts."""


class Option(NamedTuple):
    """One row of a table: an option's name, and its type, unit, default and bounds as the page shows them."""

    name: str
    kind: str
    unit: str
    default: str
    bounds: str


class OptionGroup(NamedTuple):
    """A TypedDict of options: an object with the defaults, the checked ranges, and the names of options that the object
    has under another name."""

    options: type
    defaults: object
    ranges: Mapping[str, NumberRange]
    other_names: Mapping[str, str]


MIB: Final = 1 << 20
START: Final = {"consume_from": "start.where", "consume_timestamp_ms": "start.timestamp_ms"}
GROUPS: Final = {
    "ProducerOptions": OptionGroup(producer.ProducerOptions, producer.ProducerSettings(), producer.RANGES, {}),
    "PullOptions": OptionGroup(
        pull.PullOptions, pull.PullSettings("g"), pull.RANGES, {**START, "allocate_strategy": "allocation.strategy"}
    ),
    "SimpleOptions": OptionGroup(simple.SimpleOptions, simple.SimpleSettings("g"), {}, START),
    "PushOptions": OptionGroup(push.PushOptions, push_settings.PushSettings("g", ()), push_settings.RANGES, {}),
}
"""The groups of options behind `Unpack[…]`, by the TypedDict's name. A new group must be added here."""


def options_of(call: Callable[..., Any], *, with_groups: bool = True) -> Iterator[Option]:
    """Yield every option of a call, in the order of its signature.

    `with_groups`: also yield the options behind `Unpack[…]`. Raises KeyError if GROUPS lacks such a TypedDict.
    """
    ranges: Mapping[str, NumberRange] = getattr(call, "number_ranges", {})
    module = sys.modules[inspect.unwrap(call).__module__]
    for name, parameter in inspect.signature(call).parameters.items():
        if name == "self":
            continue
        if unpacked := re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation)):
            yield from _options_in(GROUPS[unpacked[1]]) if with_groups else ()
        else:
            yield _option(name, str(parameter.annotation), parameter.default, ranges.get(name), module)


def _options_in(group: OptionGroup) -> Iterator[Option]:
    module = sys.modules[group.options.__module__]
    for name, annotation in group.options.__annotations__.items():
        kind = annotation.__forward_arg__ if isinstance(annotation, typing.ForwardRef) else str(annotation)
        default: Any = group.defaults
        for attribute in group.other_names.get(name, name).split("."):
            default = getattr(default, attribute)
        yield _option(name, kind, default, group.ranges.get(name), module)


def _option(name: str, kind: str, default: Any, bounds: NumberRange | None, module: Any) -> Option:
    is_number = re.search(r"\b(int|float)\b", kind) is not None
    unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "") if is_number else ""
    if is_number and bounds is None:
        bounds = TIME_MS if unit.startswith("ms") else NumberRange()
    alias = getattr(module, kind, None)
    if typing.get_origin(alias) is typing.Literal:
        kind = " | ".join(map(repr, typing.get_args(alias)))
    members = list(alias.__members__) if isinstance(alias, type) and issubclass(alias, Enum) else []
    limits = _range(bounds) if bounds is not None else ", ".join(f"`{member}`" for member in members)
    return Option(name, kind, unit, _default(default, unit), limits)


def _range(bounds: NumberRange) -> str:
    low, high = (_number(value) for value in bounds[:2])
    text = f"at least {low}" if bounds.high >= NumberRange().high else f"{low} to {high}"
    text = "any" if bounds == NumberRange() else text
    return text if bounds.otherwise is None else f"{text}, or {bounds.otherwise}"


def _number(value: float) -> str:
    if value == LONGEST_TIME_S:
        return "1e9"
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value // MIB:,} MiB" if value % (MIB << 10) else f"{value // (MIB << 10):,} GiB"
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _default(value: Any, unit: str) -> str:
    if value is inspect.Parameter.empty:
        return "required"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    if isinstance(value, Compression):
        return f"`Compression({value.type.name})`"
    if isinstance(value, Allocation):
        return f"`Allocation({value.strategy.name})`"
    if callable(value):
        return "does nothing"
    if unit == "bytes":
        return _number(value)
    return f"`{value!r}`"


def table_of(name: str, *, with_groups: bool = True) -> str:
    """Return the Markdown table of a call's options. `name` is a key of CALLS; `with_groups` as in `options_of`."""
    lines = ["| option | type | unit | default | bounds |", "|---|---|---|---|---|"]
    for option in options_of(CALLS[name], with_groups=with_groups):
        kind = option.kind.replace("|", "\\|")
        lines.append(f"| `{option.name}` | `{kind}` | {option.unit} | {option.default} | {option.bounds} |")
    return "\n".join(lines)


def fill_in(text: str) -> str:
    """Replace each line ``<!-- options of NAME -->`` of a page by the table of NAME.

    The table of a line ``<!-- own options of NAME -->`` has no options behind `Unpack[…]`.
    """
    line = re.compile(r"^<!-- (own )?options of (\S+) -->$", re.MULTILINE)
    return line.sub(lambda found: table_of(found[2], with_groups=found[1] is None), text)
