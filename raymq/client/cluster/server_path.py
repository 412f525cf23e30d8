"""Sets the import path of server processes, so that raymq's own `storage`, `actors` and `placement` come first.

Users and other distributions have packages with these names. So the wheel has raymq's three packages, called floors, in
`raymq/_floors/`, a folder that is on no user process's import path. In a checkout, the packages are beside `raymq/`. A
server process calls `put_floors_first` before it imports one of the packages. The call works whatever is on PYTHONPATH,
in site-packages or in the current directory. A user's process never calls it: its `import storage` finds the user's
package.

    python -P -m raymq.client.cluster.server_path MODULE    # runs MODULE.main(), with the floors first
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def floors() -> Path:
    """Return the folder that contains this raymq's packages `storage`, `actors` and `placement`."""
    package = Path(__file__).resolve().parents[2]
    in_wheel = package / "_floors"
    return in_wheel if in_wheel.is_dir() else package.parent


def put_floors_first() -> None:
    """Make `import storage`, `actors` and `placement` find raymq's packages in this process from now on.
    Idempotent."""
    folder = str(floors())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def main() -> None:
    """Run the `main` function of the server module that is named on the command line."""
    put_floors_first()
    import_module(sys.argv[1]).main()


if __name__ == "__main__":
    main()
