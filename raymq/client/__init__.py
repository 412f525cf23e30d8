"""The client of a program: it connects, produces, consumes and administers.

`Client` and `connect` can be imported from here. Ray Serve keeps the code of an autoscaling policy and runs it after an
upgrade, too; that code imports `connect` from `raymq.client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymq.client.client import Client as Client, connect as connect


def __getattr__(name: str) -> Any:
    """Import `Client` or `connect` at its first use, so that other rooms of this wing do not load the whole client."""
    if name not in ("Client", "connect"):
        raise AttributeError(f"module 'raymq.client' has no attribute {name!r}")
    from raymq.client import client

    value = getattr(client, name)
    globals()[name] = value
    return value
