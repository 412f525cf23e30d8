"""Sends a message back to its broker, which delivers it to the group again later, or stores it as a dead letter."""

from __future__ import annotations

from typing import Final

from raymq.common.message import MessageExt, MessageQueue
from raymq.remoting.actor_ref import ActorRef
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients, call_master

SEND_BACK_CALL_S: Final = 20.0
"""Timeout in s of each of the two calls: the read of the record, and the call that sends it back."""


def send_back_message(
    group: str,
    message: MessageExt,
    queue: MessageQueue,
    routes: RouteCache,
    storages: StorageClients,
    *,
    delay_level: int,
    max_reconsume_times: int,
) -> None:
    """Send a message back for its group, as PullConsumer.send_back does. Blocks for remote calls. `queue`: the
    message's queue, with the namespace of its topic."""
    record = call_master(
        routes,
        storages,
        queue,
        SEND_BACK_CALL_S,
        lambda storage, left_s: storage.record_at(message.physical_offset, left_s),
    )
    ActorRef(message.broker_name).call(
        "send_back",
        group,
        record,
        delay_level=delay_level,
        max_reconsume_times=max_reconsume_times,
        timeout_s=SEND_BACK_CALL_S,
    )
