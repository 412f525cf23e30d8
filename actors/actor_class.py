"""Actor classes and remote functions that any program can unpickle, whatever is on its import path.

`ray.get_actor` loads the actor's class in the calling process, to read the methods' signatures. A class that is pickled
by reference would be imported from the caller's own packages, and a user's program may have an `actors` or a `storage`
package. So Ray gets a stand-in: a class of the same name and with the same methods, made here and therefore pickled by
value. The stand-in imports the real class only in the actor's process. There it puts raymq's packages of that node
first on the import path (raymq.client.cluster.server_path). `remote_function` does the same for a function that runs as
a Ray task.

If access is on, a stand-in also authenticates the calls of its server. Each method has a twin, named `signed_` and the
method's name. The twin takes a signature and the pickled arguments, and lets actors.access.authenticated_server check
the signature before it unpickles the arguments. The plain methods then refuse calls. Both are in the same concurrency
group. The keyword `access` of the stand-in's constructor, which the real class does not get, turns access on.
raymq.remoting.access.stand_in makes the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raymq.remoting.access.stand_in import server_class_body


def actor_class(real: type) -> type:
    """Make a class that behaves as `real`, and that can be unpickled without importing its module."""
    module_name, class_name = real.__module__, real.__name__

    def put_floors_first(cls: type, *args: Any, **kwargs: Any) -> Any:
        from raymq.client.cluster import server_path

        server_path.put_floors_first()
        return object.__new__(cls)

    def construct(self: Any, *args: Any, access: Any = None, **kwargs: Any) -> None:
        import os
        from importlib import import_module

        os.umask(0o077)  # a server's files are for its user only
        import_module("actors.server_log").configure(class_name)
        self._authentication = None
        # before the real server is made, so that its lanes require users and its own calls are signed
        if access is not None:
            self._authentication = import_module("actors.access.authenticated_server").start_authentication(
                access, class_name
            )
        self._real = getattr(import_module(module_name), class_name)(*args, **kwargs)

    # In __new__ and not in __init__: Ray makes the object before it unpickles the arguments, whose classes may be in
    # raymq's own packages. A process that only gets a handle of the actor makes no object.
    return type(class_name, (), {**server_class_body(real, construct), "__new__": put_floors_first})


def remote_function(real: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that behaves as `real`, a module's function, and that can be unpickled without importing it."""
    module_name, function_name = real.__module__, real.__name__

    def run(*args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        from raymq.client.cluster import server_path

        server_path.put_floors_first()
        return getattr(import_module(module_name), function_name)(*args, **kwargs)

    run.__name__ = function_name
    return run
