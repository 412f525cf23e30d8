"""Actor classes and remote functions that any program can unpickle, whatever is on its import path.

`ray.get_actor` loads the actor's class where it is called, to learn the methods' signatures. A class that is pickled by
reference would be imported from among the caller's own packages, and a user's program may have an `actors` or a
`storage` of its own. So Ray is given a stand-in: a class of the same name and with the same methods, made here and
therefore pickled by value, which imports the real class only in the actor's process. There it puts raymq's packages
first on the import path, wherever that node has them (raymq.cluster.server_path). `remote_function` does the same for a
function that runs as a Ray task.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def actor_class(real: type) -> type:
    """A class that behaves as `real`, and that can be unpickled without importing its module."""
    module_name, class_name = real.__module__, real.__name__

    def put_floors_first(cls: type, *args: Any, **kwargs: Any) -> Any:
        from raymq.cluster import server_path

        server_path.put_floors_first()
        return object.__new__(cls)

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        import os
        from importlib import import_module

        os.umask(0o077)  # files of a server are for its user only
        self._real = getattr(import_module(module_name), class_name)(*args, **kwargs)

    # In __new__ and not in __init__: Ray makes the object before it unpickles the arguments, whose classes may be of
    # the floors. A process that only gets a handle of the actor makes none.
    namespace: dict[str, Any] = {"__doc__": real.__doc__, "__module__": module_name, "__new__": put_floors_first}
    methods: dict[str, Callable[..., Any]] = {"__init__": construct}
    for name, _ in inspect.getmembers(real, inspect.isfunction):
        if not name.startswith("_"):
            methods[name] = _forward(name)
    for name, method in methods.items():
        function = getattr(real, name)
        method.__doc__ = function.__doc__
        method.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # typeshed lacks it
        method.__dict__.update(_marks_of_ray(function))
        namespace[name] = method
    return type(class_name, (), namespace)


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
        return getattr(self._real, name)(*args, **kwargs)

    method.__name__ = name
    return method


def _marks_of_ray(function: Callable[..., Any]) -> dict[str, Any]:
    """The attributes that `ray.method` has set on a method, for example its concurrency group."""
    return {name: value for name, value in vars(function).items() if name.startswith("__ray_")}
