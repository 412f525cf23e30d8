"""Administration within a namespace: `Admin` with the names that the namespace's users see.

    arguments   by the parameter's name (`topic`, `group`, `queue` …), whatever type they have ▶ stored names
    results     by type: queues, messages, and the fields of dataclasses that hold names ▶ shown names
    errors      their texts, without the namespace

Returned lists contain only the topics and groups of the namespace. They leave out names of other namespaces and raymq's
internal names. All calls of `Admin` use the same translation of names. A new call of `Admin` needs no change in this
module if its parameters and fields are named as in other calls. A test checks that they are.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import wraps
from typing import Any, Final

from msgspec import Struct, structs

from raymq.client.admin.dead_letters import DeadLetters
from raymq.common.closing import OfProcess
from raymq.common.errors import RaymqError
from raymq.common.message import MessageExt, MessageQueue
from raymq.common.namespaces import NAMESPACE_SEPARATOR, Namespace

NAME_PARAMETERS: Final = frozenset(
    "topic topics group groups queue queues source target to_topic to_group pattern config configs positions message"
    " letters metadata backlog_groups".split()
)
"""Parameters of Admin's calls whose values are names of topics or groups, or contain such names."""
OTHER_PARAMETERS: Final = frozenset(
    """actions after backlog_policy begin_ms begin_offset boundary bounds broker_name brokers changes cleanup_policy
    contains count cursor damage dead_letters decision directory dry_run enabled end_ms ids internal is_super key
    least limit max_backlog max_backlog_bytes max_messages max_ms max_scanned member message_id message_type name
    namespace newest_first offset on_progress parts perm progress queue_type rate replace replayed reserve_time_s
    resource secret settings sources stacks tags timeout_s timestamp_ms to trace_topic user value wait_s
    whole_bodies with_pairs writable""".split()
)
"""Parameters of Admin's calls whose values are not names of topics or groups, and contain no such names."""
NAME_FIELDS: Final = frozenset("topic topics group groups target subscriptions forbidden producer_group".split())
"""Fields of results that contain names of topics or groups: one name, several names, or a mapping whose keys
are names."""
NAMES_RETURNED: Final = frozenset(
    "list_topics list_groups forbidden_topics topic_attributes topic_routes group_stats light_queues".split()
)
"""Names of Admin's calls that return topic, group or queue names, either directly or as the keys of a mapping."""
_HOMES: Final = ("topic", "group", "queue", "config", "consumer")
"""Names of attributes that the elements of Admin's lists may have. The topic, group or queue in such an attribute shows
to which namespace the element belongs."""


class NamespacedCalls(OfProcess):
    """Wraps an Admin, or an object that a call of Admin returned. The wrapped calls take and return the names of a
    namespace."""

    def __init__(self, target: Any, names: Namespace) -> None:
        self._target, self._names = target, names

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name.startswith("_") or not callable(found):
            return found
        return _namespaced(found, name, self._names)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._target) if not name.startswith("_")]


def _namespaced(call: Callable[..., Any], name: str, names: Namespace) -> Callable[..., Any]:
    parameters = inspect.signature(call)
    stored = _Translation(names.wrap, None)
    shown = _Translation(names.unwrap, names)

    @wraps(call)
    def within(*args: Any, **kwargs: Any) -> Any:
        bound = parameters.bind(*args, **kwargs)
        for parameter, value in bound.arguments.items():
            if parameter in NAME_PARAMETERS:
                bound.arguments[parameter] = stored.value(value, named=True)
        try:
            result = call(*bound.args, **bound.kwargs)
        except RaymqError as error:
            raise _shown_error(error, names) from None
        if isinstance(result, DeadLetters):
            return NamespacedCalls(result, names)
        shown_result = shown.value(result, named=name in NAMES_RETURNED)
        return _with_shown_errors(shown_result, names) if isinstance(result, Iterator) else shown_result

    return within


def _with_shown_errors(values: Iterator[Any], names: Namespace) -> Iterator[Any]:
    try:
        yield from values
    except RaymqError as error:
        raise _shown_error(error, names) from None


def _shown_error(error: RaymqError, names: Namespace) -> RaymqError:
    prefix = names.name + NAMESPACE_SEPARATOR
    told: RaymqError = type(error)(*(_shown_argument(arg, prefix) for arg in error.args))
    return told


def _shown_argument(argument: Any, prefix: str) -> Any:
    if isinstance(argument, tuple):
        return tuple(_shown_argument(one, prefix) for one in argument)
    return argument.replace(prefix, "") if isinstance(argument, str) else argument


class _Translation:
    """Translates the topic and group names within a value. `only`: a namespace; if set, list elements of other
    namespaces are left out."""

    def __init__(self, name: Callable[[str], str], only: Namespace | None) -> None:
        self._name, self._only = name, only

    def value(self, value: Any, *, named: bool) -> Any:
        """Return a copy of `value` with translated topic and group names. `named`: True if a text in `value` is such a
        name, also in a list or as a key of a mapping."""
        if isinstance(value, Enum | bytes | int | float) or value is None:
            return value
        if isinstance(value, str):
            return self._name(value) if named else value
        if isinstance(value, MessageQueue):
            return MessageQueue(self._name(value.topic), value.broker_name, value.queue_id)
        if isinstance(value, MessageExt):
            return value._in_queue(self._name(value.topic), value.queue_id)
        if isinstance(value, Mapping):
            return self._mapping(value, named)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.value(one, named=name in NAME_FIELDS) for name, one in _fields_of(value)))
        if isinstance(value, list | tuple | set | frozenset):
            return type(value)(self.value(one, named=named) for one in value if self._is_shown(one, named))
        if isinstance(value, Iterator):
            return (self.value(one, named=named) for one in value if self._is_shown(one, named))
        if isinstance(value, Struct) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return self._record(value)
        return value

    def _mapping(self, value: Mapping[Any, Any], named: bool) -> Any:
        made = {
            self.value(key, named=named): self.value(one, named=named)
            for key, one in value.items()
            if self._is_shown(key, named)
        }
        if type(value) is dict or not isinstance(value, dict):
            return made
        kept = copy.copy(value)  # copy the value, so that a subclass of dict keeps its class and its own attributes
        kept.clear()
        kept.update(made)
        for name, own in vars(value).items():
            setattr(kept, name, self.value(own, named=named))
        return kept

    def _record(self, value: Any) -> Any:
        changed = {}
        for name, one in _fields_of(value):
            new = self.value(one, named=name in NAME_FIELDS)
            if new is not one:
                changed[name] = new
        if not changed:
            return value
        if isinstance(value, Struct):
            return structs.replace(value, **changed)
        return dataclasses.replace(value, **changed)

    def _is_shown(self, value: Any, named: bool) -> bool:
        if self._only is None:
            return True
        home = value if named and isinstance(value, str) else _home(value)
        return home is None or self._only.has(home)


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, tuple):
        yield from zip(value._fields, value, strict=True)  # type: ignore[attr-defined]  # a NamedTuple
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield name, getattr(value, name)
    else:
        for field in dataclasses.fields(value):
            if field.init:
                yield field.name, getattr(value, field.name)


def _home(value: Any) -> str | None:
    """Return the topic or group name that shows to which namespace `value` (an element of a list) belongs, in its
    stored form. Returns None if `value` has no such name."""
    if isinstance(value, MessageQueue | MessageExt):
        return value.topic
    for name in _HOMES:
        one = getattr(value, name, None)
        if isinstance(one, str):
            return one
        if one is not None and not callable(one):
            found = _home(one)
            if found is not None:
                return found
    return None
