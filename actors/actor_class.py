"""Actor classes and remote functions that any program can unpickle, whatever is on the program's import path.

`ray.get_actor` loads the actor's class in the calling process, to read the methods' signatures. If the class were
pickled by reference, Python would import it from the caller's own packages, and a user's program may have an `actors`
or a `storage` package. So Ray gets a stand-in: a class with the same name and methods. It is created in this module and
therefore pickled by value. The stand-in imports the real class only in the actor's process. In that process it first
puts raymq's packages of the node at the front of the import path (raymq.client.cluster.server_path). `remote_function`
does the same for a function that runs as a Ray task.

If access is on, a stand-in also authenticates the calls of its server. Each method has a signed variant, named
`signed_` and the method's name, in the same concurrency group. The signed variant takes a signature and the pickled
arguments. actors.access.authenticated_server checks the signature before it unpickles the arguments. The unsigned
methods reject calls. The keyword `access` of the stand-in's constructor turns access on; the real class does not get
this keyword. raymq.remoting.access.stand_in makes the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raymq.remoting.access.stand_in import server_class_body


def actor_class(real: type) -> type:
    """Make a class that behaves as the class `real`, and that can be unpickled without importing the module of
    `real`."""
    module_name, class_name = real.__module__, real.__name__

    def put_floors_first(cls: type, *args: Any, **kwargs: Any) -> Any:
        from raymq.client.cluster import server_path

        server_path.put_floors_first()
        return object.__new__(cls)

    def construct(self: Any, *args: Any, access: Any = None, **kwargs: Any) -> None:
        import os
        from importlib import import_module

        os.umask(0o077)  # only the server's user may read the files that the server creates
        import_module("actors.server_log").configure(class_name)
        self._authentication = None
        # Start authentication before the real server is made, so that the server's lanes (direct socket connections)
        # require users and its own calls are signed.
        if access is not None:
            self._authentication = import_module("actors.access.authenticated_server").start_authentication(
                access, class_name
            )
        self._real = getattr(import_module(module_name), class_name)(*args, **kwargs)

    # The import path is set in __new__, not in __init__: Ray makes the object before it unpickles the arguments, and
    # the arguments' classes may be in raymq's own packages. A process that only gets a handle of the actor makes no
    # object.
    return type(class_name, (), {**server_class_body(real, construct), "__new__": put_floors_first})


def remote_function(real: Callable[..., Any]) -> Callable[..., Any]:
    """Make a stand-in for the module-level function `real` that can be unpickled without importing its module."""
    module_name, function_name = real.__module__, real.__name__

    def run(*args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        from raymq.client.cluster import server_path

        server_path.put_floors_first()
        return getattr(import_module(module_name), function_name)(*args, **kwargs)

    run.__name__ = function_name
    return run
