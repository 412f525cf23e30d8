"""The client package: connections, producers, consumers and administration.

`Client` and `connect` can be imported from this package. Ray Serve stores the code of an autoscaling policy and still
runs the stored code after an upgrade of raymq. The stored code imports `connect` from `raymq.client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymq.client.client import Client as Client, connect as connect


def __getattr__(name: str) -> Any:
    """Import `Client` or `connect` on first use, so that importing another client subpackage does not load the whole
    client."""
    if name not in ("Client", "connect"):
        raise AttributeError(f"module 'raymq.client' has no attribute {name!r}")
    from raymq.client import client

    value = getattr(client, name)
    globals()[name] = value
    return value
