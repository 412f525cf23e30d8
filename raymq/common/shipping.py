"""Serialises functions of a user's program with cloudpickle, for processes that lack the program's modules.

A function is pickled by value together with its module or package. So the module need not be installed in the process
that calls the function.
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
        module = None  # the user has registered the module for pickling by value, so do not unregister it
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(thing)  # type: ignore[no-any-return]  # cloudpickle has no types
    except Exception as error:  # catch every exception, because pickling runs the user's code
        raise refusal(error) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def deferred_kind(function: Callable[..., Any]) -> str:
    """Return the kind of a function whose call only creates an object: "a coroutine function", "a generator function"
    or "an async generator function". Returns an empty text for other functions. Partials are unwrapped. For an object
    with `__call__`, the result is the kind of this method."""
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
        return None  # no registration is necessary, because cloudpickle always pickles objects of __main__ by value
    installed = [Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")]
    if any(Path(file).is_relative_to(root) for root in installed):
        return None
    # Return the top-level package of the function's module, because the package's modules import each other and must
    # all be pickled by value.
    return sys.modules.get(module.__name__.partition(".")[0], module)
