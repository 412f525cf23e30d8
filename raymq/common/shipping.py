"""Serialises functions of a user's program by cloudpickle, for processes that lack the program's modules.

A function is pickled by value together with its module or package, so the module need not be installed where the
function runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle


def dumps_by_value(thing: Any, refusal: Callable[[Exception], Exception]) -> bytes:
    """Pickle a user's function or object by value. Raises the exception that `refusal(reason)` returns if the object
    cannot be pickled."""
    module = _user_module(thing)
    if module is not None and module.__name__ in cloudpickle.list_registry_pickle_by_value():
        module = None  # the user has registered the module for pickling by value, so it stays registered
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(thing)  # type: ignore[no-any-return]  # cloudpickle has no types
    except Exception as error:  # pickling runs the user's code, which may raise anything
        raise refusal(error) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def deferred_kind(function: Callable[..., Any]) -> str:
    """Return the kind of a function whose call only creates an object: "a coroutine function", "a generator function"
    or "an async generator function"; empty for other functions. Partials are unwrapped, and for an object with
    `__call__` the method of its class counts."""
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func
    if not inspect.isroutine(called) and not inspect.isclass(called):
        called = type(called).__call__
    if inspect.isasyncgenfunction(called):
        return "an async generator function"
    if inspect.isgeneratorfunction(called):
        return "a generator function"
    return "a coroutine function" if inspect.iscoroutinefunction(called) else ""


def _user_module(thing: Any) -> ModuleType | None:
    """Return the user's module or package that defines `thing`; None if the standard library or an installed package
    defines it."""
    owner: Any = thing
    while isinstance(owner, functools.partial):
        owner = owner.func
    owner = owner if hasattr(owner, "__qualname__") else type(owner)
    module = sys.modules.get(getattr(inspect.unwrap(owner), "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None  # cloudpickle pickles __main__ by value anyway
    installed = [Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")]
    if any(Path(file).is_relative_to(root) for root in installed):
        return None
    # Register the whole package, because its modules import each other.
    return sys.modules.get(module.__name__.partition(".")[0], module)
