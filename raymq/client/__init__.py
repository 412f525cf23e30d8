"""The client package: connections, producers, consumers and administration.

`Client` and `connect` must stay importable from this package. Ray Serve stores the code of an autoscaling policy, and
runs the stored code even after an upgrade of raymq. This code imports `connect` from `raymq.client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymq.client.client import Client as Client, connect as connect


def __getattr__(name: str) -> Any:
    """Import `Client` or `connect` on first use. An import of only a subpackage of `raymq.client` then does not load
    the whole client."""
    if name not in ("Client", "connect"):
        raise AttributeError(f"module 'raymq.client' has no attribute {name!r}")
    from raymq.client import client

    value = getattr(client, name)
    globals()[name] = value
    return value
