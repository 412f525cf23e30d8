"""The register in Ray's GCS, by which one of several processes comes to hold something.

It is the store in which Ray keeps what it knows of the cluster itself, so it is there as long as the cluster is.
"""

from __future__ import annotations

from typing import Any, Final

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from actors.core.rebalance.slot_lease import Drop, Get, Look, Put

REGISTER_NAMESPACE: Final = "raymq-rebalance"


def run(look: Look) -> None:
    """Carry out the register calls of a generator. Waits for the GCS, as long as Ray does; raises what Ray raises."""
    try:
        call = next(look)
        while True:
            call = look.send(_carry_out(call))
    except StopIteration:
        return


def _carry_out(call: Get | Put | Drop) -> Any:
    if isinstance(call, Get):
        value = _internal_kv_get(call.key, namespace=REGISTER_NAMESPACE)
        return None if value is None else value.decode()
    if isinstance(call, Put):
        existed = _internal_kv_put(call.key, call.value, overwrite=call.overwrite, namespace=REGISTER_NAMESPACE)
        return call.overwrite or not existed
    return _internal_kv_del(call.key, namespace=REGISTER_NAMESPACE)
