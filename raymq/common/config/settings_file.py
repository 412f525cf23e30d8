"""Reads a YAML file of settings, with limits on its content.

A short YAML file can have a huge value, because an alias repeats a whole tree. Nested brackets exhaust the parser's
stack, and a repeated key silently replaces the first value. So the reader limits the file's size, values and nesting,
and refuses aliases and repeated keys. Each error names the line of the file.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import yaml

from raymq.common.errors import ConfigError

MAX_BYTES: Final = 64 * 1024
MAX_DEPTH: Final = 16
MAX_VALUES: Final = 10_000


def read_settings_file(file: Path) -> dict[Any, Any]:
    """Return the settings in `file`; empty if the file has no values.

    Raises ConfigError with the file and the reason if the file cannot be read, is not YAML, or is not a mapping. Raises
    ConfigError too if the file has more than MAX_BYTES bytes or MAX_VALUES values, is nested more than MAX_DEPTH deep,
    repeats a key, or has anchors or aliases.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read settings from {file}: {error.strerror}; choose another file, or leave the option out"
        ) from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES >> 10} KiB, so it is not a settings file")
    try:
        values = _parse(content.decode())
    except _RefusedError as error:
        raise ConfigError(f"{file}, line {error.line}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"{file}{line} is not YAML: {error.problem}; correct this line or a line before it") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # For some invalid values, such as `!!int abc` or a date in month 13, PyYAML raises ValueError or OverflowError
        # instead of its own YAMLError.
        raise ConfigError(f"{file} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must be a mapping of settings, not a {type(values).__name__}")
    return values


def read_setting(name: str, text: str) -> Any:
    """Parse a setting's value that a user typed, as `read_settings_file` does. Raises ConfigError with the setting and
    the reason if the text is not a valid value."""
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"the value has more than {MAX_BYTES >> 10} KiB")
        return _parse(text)
    except (_RefusedError, yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{text[:200]!r} is not a valid value of setting {name!r}: {error}") from None


class _RefusedError(Exception):
    """Raised if a YAML file of settings contains something that it may not contain, such as an alias or a
    repeated key."""

    def __init__(self, text: str, mark: Any) -> None:
        super().__init__(text)
        self.line = mark.line + 1


class _BoundedLoader(yaml.SafeLoader):
    """A safe YAML loader with limits, which refuses anchors, aliases and repeated keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        parser: Any = self  # PyYAML's type stubs leave the parser's methods untyped
        event = parser.peek_event()
        # This condition finds both anchors (`&name`) and aliases (`*name`), because the events of both have the
        # attribute `anchor`.
        if getattr(event, "anchor", None) is not None:
            text = "anchors and aliases (& and *) are not allowed in settings; write the values out"
            raise _RefusedError(text, event.start_mark)
        self._values += 1
        self._depth += 1
        if self._values > MAX_VALUES:
            raise _RefusedError(f"the file has more than {MAX_VALUES:,} values", event.start_mark)
        if self._depth > MAX_DEPTH:
            raise _RefusedError(f"the settings are nested more than {MAX_DEPTH} deep", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)
        return super().construct_mapping(node, deep)  # type: ignore[arg-type]  # refuses other nodes itself


def _check_keys(node: yaml.MappingNode) -> None:
    """Raise an error if a key of the YAML mapping `node` is a list or a mapping, or if a key is repeated."""
    first: dict[str, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _RefusedError("a key must be a name, not a list or a mapping", key.start_mark)
        if key.value in first:
            text = f"key {key.value!r} is given twice, first in line {first[key.value]}; keep one of them"
            raise _RefusedError(text, key.start_mark)
        first[key.value] = key.start_mark.line + 1


def _parse(text: str) -> Any:
    loader = _BoundedLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
