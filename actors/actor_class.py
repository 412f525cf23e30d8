"""Actor classes and remote functions that any program can unpickle, whatever is on its import path.

`ray.get_actor` loads the actor's class where it is called, to learn the methods' signatures. A class that is pickled by
reference would be imported from among the caller's own packages, and a user's program may have an `actors` or a
`storage` of its own. So Ray is given a stand-in: a class of the same name and with the same methods, made here and
therefore pickled by value, which imports the real class only in the actor's process. There it puts raymq's packages
first on the import path, wherever that node has them (raymq.cluster.server_path). `remote_function` does the same for a
function that runs as a Ray task.

A stand-in is also the door of its server, where access is on. Each method has a twin, `signed_` and its name, which
takes a signature and the pickled arguments, and asks the server's gate (actors.access.door) before these are unpickled.
The plain methods refuse then. Both are of the same concurrency group. A server is told by the keyword `access` of its
constructor, which the real class does not see, that access is on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from raymq.identity import SIGNED


def actor_class(real: type) -> type:
    """A class that behaves as `real`, and that can be unpickled without importing its module."""
    module_name, class_name = real.__module__, real.__name__

    def put_floors_first(cls: type, *args: Any, **kwargs: Any) -> Any:
        from raymq.cluster import server_path

        server_path.put_floors_first()
        return object.__new__(cls)

    def construct(self: Any, *args: Any, access: Any = None, **kwargs: Any) -> None:
        import os
        from importlib import import_module

        os.umask(0o077)  # files of a server are for its user only
        self._door = None
        if access is not None:  # before the real one, so that its lanes ask for users and its own calls are signed
            self._door = import_module("actors.access.door").open_door(access, class_name)
        self._real = getattr(import_module(module_name), class_name)(*args, **kwargs)

    # In __new__ and not in __init__: Ray makes the object before it unpickles the arguments, whose classes may be of
    # the floors. A process that only gets a handle of the actor makes none.
    namespace: dict[str, Any] = {"__doc__": real.__doc__, "__module__": module_name, "__new__": put_floors_first}
    namespace["__init__"] = construct
    construct.__doc__ = real.__init__.__doc__  # type: ignore[misc]  # it is read only
    construct.__signature__ = _with_access(inspect.signature(real.__init__))  # type: ignore[attr-defined,misc]  # as below
    for name, function in inspect.getmembers(real, inspect.isfunction):
        if name.startswith("_"):
            continue
        plain, signed = _forward(name), _forward_signed(name)
        plain.__doc__ = function.__doc__
        plain.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # typeshed lacks it
        for method in (plain, signed):
            method.__dict__.update(_marks_of_ray(function))
            namespace[method.__name__] = method
    return type(class_name, (), namespace)


def _with_access(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a constructor that takes `access`, too."""
    parameters = list(signature.parameters.values())
    if any(one.name == "access" for one in parameters):
        raise TypeError("a server's constructor has no argument called access: that is its stand-in's")
    at = next((index for index, one in enumerate(parameters) if one.kind is one.VAR_KEYWORD), len(parameters))
    parameters.insert(at, inspect.Parameter("access", inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)


def remote_function(real: Callable[..., Any]) -> Callable[..., Any]:
    """A function that behaves as `real`, a function of a module, and that can be unpickled without importing it."""
    module_name, function_name = real.__module__, real.__name__

    def run(*args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        from raymq.cluster import server_path

        server_path.put_floors_first()
        return getattr(import_module(module_name), function_name)(*args, **kwargs)

    run.__name__ = function_name
    return run


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._door is not None:
            self._door.refuse_unsigned(name)
        return getattr(self._real, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _forward_signed(name: str) -> Callable[..., Any]:
    """The twin of a method. Where access is off nobody looks at the signature: a client may sign all its calls."""

    def method(self: Any, signature: Any, payload: bytes) -> Any:
        if self._door is not None:
            return self._door.enter(name, signature, payload, getattr(self._real, name))
        import pickle

        args, kwargs = pickle.loads(payload)
        return getattr(self._real, name)(*args, **kwargs)

    method.__name__ = SIGNED + name
    method.__doc__ = f"`{name}`, with a signature and the pickled arguments."
    return method


def _marks_of_ray(function: Callable[..., Any]) -> dict[str, Any]:
    """The attributes that `ray.method` has set on a method, for example its concurrency group."""
    return {name: value for name, value in vars(function).items() if name.startswith("__ray_")}
