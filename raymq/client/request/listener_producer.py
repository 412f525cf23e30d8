"""The producers that a listener's process makes by itself, for replies and for its trace.

The process has joined Ray and has no client of raymq; what is made here ends with it.
"""

from __future__ import annotations

import ray

from raymq.client.producer.producer import Producer
from raymq.client.producer.settings import SEND_TIMEOUT_S, ProducerSettings
from raymq.remoting.actor_ref import running_nameservers
from raymq.remoting.route_cache import RouteCache
from raymq.remoting.storage_clients import StorageClients
from raymq.telemetry.trace.deliveries import DeliveryTrace
from raymq.telemetry.trace.dispatcher import TRACE_PRODUCER_GROUP, TRACE_SEND_TIMEOUT_S, TraceDispatcher


def listener_producer(group: str, send_timeout_s: float = SEND_TIMEOUT_S) -> Producer:
    """A producer of this process, which has joined Ray."""
    storages = StorageClients(ray.get_runtime_context().get_node_id())
    return Producer(
        group,
        routes=RouteCache(running_nameservers()),
        storage=storages.get,
        born_host=(ray.util.get_node_ip_address(), 0),
        settings=ProducerSettings(send_timeout_s=send_timeout_s),
    )


def listener_trace(group: str, topic: str) -> DeliveryTrace:
    """The trace of this process, whose listener consumes as a member of `group`. Connects when there is something to
    send."""
    return DeliveryTrace(
        group, TraceDispatcher(lambda: listener_producer(TRACE_PRODUCER_GROUP, TRACE_SEND_TIMEOUT_S), topic)
    )
