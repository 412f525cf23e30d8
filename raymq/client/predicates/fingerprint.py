"""The fingerprint of a function: equal for the same code, wherever its module lies and in whichever process.

Two pickles of one function differ by the path of its file and by the order of sets, so they cannot say whether two
members of a group mean the same predicate.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

DIGITS: Final = 12
_DEPTH_MAX: Final = 16
"""Values that lie deeper count by their types only."""

_EMPTY_CELL: Final = CellType()


def fingerprint(function: Any) -> str:
    """Hexadecimal digits that name what a function does: its code and constants, its defaults, and the values and
    functions of the program that it uses. Objects of other kinds count by their types alone."""
    digest = hashlib.sha256()
    for part in _parts(function, frozenset()):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\x00")
    return digest.hexdigest()[:DIGITS]


def _parts(value: Any, around: frozenset[int]) -> Iterator[str]:
    """`around`: the ids of the values that `value` lies in."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
        return
    yield type(value).__qualname__
    if len(around) < _DEPTH_MAX and id(value) not in around:
        for part in _members(value):
            yield from _parts(part, around | {id(value)})


def _members(value: Any) -> Iterator[Any]:
    """The values that `value` is made of."""
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
    """The names that a code, and the codes in it, may look up among the module's."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return names
