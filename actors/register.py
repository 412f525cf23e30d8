"""The register in Ray's GCS. It decides which of several processes holds a resource, and numbers the process
incarnations ("lives") of actors.

Ray stores its own cluster data in the GCS, so the register exists as long as the Ray cluster.

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
"""Number of newer process incarnations of an actor after which an incarnation's entry is deleted. No process hangs
while that many newer incarnations start."""


def run(look: Look) -> None:
    """Execute the calls to the register (a key-value store in Ray's GCS) that the generator `look` yields, and send it
    their results. Waits for the GCS as long as Ray does; raises Ray's errors."""
    try:
        call = next(look)
        while True:
            call = look.send(_carry_out(call))
    except StopIteration:
        return


def next_life(name: str, carry_out: Callable[[Get | Put | Drop], Any] | None = None) -> int:
    """Return the number, from 1, of a new process incarnation of the actor `name`.

    The number is larger than that of every earlier incarnation in this Ray cluster, regardless of clocks. `carry_out`
    executes a call to the register, a key-value store. By default, the register is in Ray's GCS.
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
