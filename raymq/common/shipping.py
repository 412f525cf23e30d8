"""Functions of a user's program as bytes of cloudpickle, for processes that do not have the program's modules.

A function goes by value together with its own module or package, so that it needs no installation where it runs.
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
    """Pickle a function or object of the user's by value. Raises `refusal(reason)` when it cannot be pickled."""
    module = _user_module(thing)
    if module is not None and module.__name__ in cloudpickle.list_registry_pickle_by_value():
        module = None  # the user's own registration, which stays
    if module is not None:
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(thing)  # type: ignore[no-any-return]  # cloudpickle has no types
    except Exception as error:  # whatever a user's object does when it is pickled
        raise refusal(error) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def deferred_kind(function: Callable[..., Any]) -> str:
    """The kind of a function whose call runs none of its code: "a coroutine function", "a generator function" or "an
    async generator function"; empty for any other one. Looks through partials and into the class of an object with
    `__call__`."""
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
    """The user's own module or package that defines a function; None for the standard library and installed ones."""
    owner: Any = thing
    while isinstance(owner, functools.partial):
        owner = owner.func
    owner = owner if hasattr(owner, "__qualname__") else type(owner)
    module = sys.modules.get(getattr(inspect.unwrap(owner), "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None  # __main__ goes by value anyway
    installed = [Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")]
    if any(Path(file).is_relative_to(root) for root in installed):
        return None
    # All of the package, because its modules import each other.
    return sys.modules.get(module.__name__.partition(".")[0], module)
