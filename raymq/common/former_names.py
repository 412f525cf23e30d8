"""Makes modules importable by their former names: `raymq.errors` is now `raymq.common.errors`.

Former names may occur in these places:

    Ray's GCS         stores the class and arguments of a detached actor, and restarts the actor from them
    Ray Serve         stores the code of an autoscaling policy
    a program         may store pickled messages and errors
    bin/raymq         imports `raymq.cli` until raymq is installed again

`import raymq` makes each former name an alias of the present module, so that every class exists only once. raymq's own
code uses no former name; tests/unit/test_house.py checks this rule.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from importlib.abc import Loader
    from types import CodeType, ModuleType

_MOVED: Final = {
    "raymq.common": "closing config delay errors identity java_text members message names namespaces parallel protocol "
    "retry shipping",
    "raymq.records": "filters hooks kernels logfiles",
    "raymq.telemetry": "metrics trace",
    "raymq.remoting": "access",
    "raymq.client": "admin cluster consumer predicates producer request scan transactions",
    "raymq.tools": "cli console doctor kubernetes observability",
}
FORMER_NAMES: Final = {
    **{f"raymq.{room}": f"{wing}.{room}" for wing, rooms in _MOVED.items() for room in rooms.split()},
    "raymq.record": "raymq.records.format",
}
"""Maps the former name of each moved package or module to its present name."""


def present_name(name: str) -> str | None:
    """Return the present name of the module whose former name is `name`. Returns None if `name` is not a former
    name."""
    top, _, rest = name.removeprefix("raymq.").partition(".")
    room = FORMER_NAMES.get(f"raymq.{top}") if name.startswith("raymq.") else None
    return f"{room}.{rest}" if room and rest else room


def accept_former_names() -> None:
    """Let this process import renamed modules of raymq under their former names. A second call changes nothing."""
    if _finder not in sys.meta_path:
        # The finder for former module names must be the first in `sys.meta_path`. Another finder would load the
        # module's file a second time, and so create each of its classes twice.
        sys.meta_path.insert(0, _finder)


class _Finder:
    """An importlib finder and loader of modules by their former names."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return an import spec for a module's former name, which loads the module under its present name. Returns None
        if `name` is not a former name, or if the module does not exist."""
        moved_to = present_name(name)
        present = None if moved_to is None else find_spec(moved_to)
        if present is None:
            return None
        spec = ModuleSpec(name, cast("Loader", self), origin=present.origin)
        # without a location the module would have no `__file__`, which `python -m` needs
        spec.has_location = present.has_location
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None, so that importlib creates an empty module. Later `exec_module` replaces this module by the
        module with the present name."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module that `sys.modules` holds under the former name by the module that has the present
        name."""
        sys.modules[module.__name__] = import_module(_present(module.__name__))

    def get_code(self, name: str) -> CodeType | None:
        """Return the module's code object, which `python -m` needs to run a module by its former name."""
        present = find_spec(_present(name))
        loader: Any = present.loader if present is not None else None
        code: CodeType | None = loader.get_code(loader.name)
        return code


def _present(name: str) -> str:
    present = present_name(name)
    assert present is not None, f"{name} is no former name"
    return present


_finder: Final = _Finder()
