"""The register in Ray's GCS: decides which of several processes holds something, and numbers the lives of actors.

Ray stores its own cluster data there, so the register exists as long as the cluster.

    lives/NAME       the number of the newest recorded life of an actor
    lives/NAME/N     the process that has life N; written once
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from actors.core.rebalance.slot_lease import Drop, Get, Look, Put

REGISTER_NAMESPACE: Final = "raymq-rebalance"
LIVES_KEPT: Final = 100
"""Numbers that are this many lives old are dropped. No process hangs for as long as that takes."""


def run(look: Look) -> None:
    """Carry out the register calls of a generator. Waits for the GCS as long as Ray does; raises what Ray raises."""
    try:
        call = next(look)
        while True:
            call = look.send(_carry_out(call))
    except StopIteration:
        return


def next_life(name: str, carry_out: Callable[[Get | Put | Drop], Any] | None = None) -> int:
    """Return the number of a new life of the actor `name`, from 1.

    It is larger than the number of every earlier life in this Ray cluster, whatever the clocks show. `carry_out`
    carries out a register call.
    """
    carry_out = carry_out or _carry_out
    key = f"lives/{name}"
    life = int(carry_out(Get(key)) or 0) + 1
    while not carry_out(Put(f"{key}/{life}", "1", overwrite=False)):
        life += 1
    carry_out(Put(key, str(life), overwrite=True))
    if life > LIVES_KEPT:
        carry_out(Drop(f"{key}/{life - LIVES_KEPT}"))
    return life


def _carry_out(call: Get | Put | Drop) -> Any:
    if isinstance(call, Get):
        value = _internal_kv_get(call.key, namespace=REGISTER_NAMESPACE)
        return None if value is None else value.decode()
    if isinstance(call, Put):
        existed = _internal_kv_put(call.key, call.value, overwrite=call.overwrite, namespace=REGISTER_NAMESPACE)
        return call.overwrite or not existed
    return _internal_kv_del(call.key, namespace=REGISTER_NAMESPACE)
