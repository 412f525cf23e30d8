"""raymq: a durable, replicated message queue inside a Ray cluster.

    with raymq.connect() as mq:
        mq.admin.create_topic("orders", queues=8)
        with mq.producer("order-service") as producer:
            producer.send(raymq.Message("orders", b"...", tags="paid", keys=["o-17"]))

Names are resolved when they are first used (PEP 562), so that importing raymq is quick and needs neither Ray nor any
other package of the server side.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raymq.async_consumer import AsyncPullConsumer
    from raymq.async_producer import AsyncProducer
    from raymq.client import Client, connect
    from raymq.compression import Compression, CompressionType
    from raymq.consume_hook import ConsumeContext, ConsumeHook
    from raymq.consume_result import ConsumeLater
    from raymq.errors import (
        ClientStateError,
        ClusterNotFoundError,
        ConfigError,
        DataLossError,
        GroupNotExistError,
        IllegalNameError,
        InSyncReplicasError,
        InvalidArgumentError,
        ListenerError,
        MessageIllegalError,
        NoPermissionError,
        NotMasterError,
        OffsetOutOfRangeError,
        RaymqError,
        RequestTimeoutError,
        SendUnknownError,
        ServiceNotAvailableError,
        StoreCorruptError,
        StoreError,
        StoreFailedError,
        StoreLockedError,
        StoreNotWritableError,
        SystemBusyError,
        TopicExistsError,
        TopicNotExistError,
    )
    from raymq.membership import AllocateStrategy, Allocation
    from raymq.message import (
        ConsumeFromWhere,
        ConsumeStatus,
        Message,
        MessageExt,
        MessageModel,
        MessageQueue,
        PullResult,
        PullStatus,
        SendResult,
        SendStatus,
    )
    from raymq.producer import Producer
    from raymq.producer_settings import ProducerSettings
    from raymq.pull_consumer import PullConsumer
    from raymq.queue_selection import QueueSelector, select_queue_by_hash, select_queue_by_random
    from raymq.send_hooks import CheckForbiddenHook, SendContext, SendMessageHook
    from raymq.table_send import QueueRange, TableResult

__version__ = "0.1.0"

__all__ = [
    "AllocateStrategy",
    "Allocation",
    "AsyncProducer",
    "AsyncPullConsumer",
    "CheckForbiddenHook",
    "Client",
    "ClientStateError",
    "ClusterNotFoundError",
    "Compression",
    "CompressionType",
    "ConfigError",
    "ConsumeContext",
    "ConsumeFromWhere",
    "ConsumeHook",
    "ConsumeLater",
    "ConsumeStatus",
    "DataLossError",
    "GroupNotExistError",
    "IllegalNameError",
    "InSyncReplicasError",
    "InvalidArgumentError",
    "ListenerError",
    "Message",
    "MessageExt",
    "MessageIllegalError",
    "MessageModel",
    "MessageQueue",
    "NoPermissionError",
    "NotMasterError",
    "OffsetOutOfRangeError",
    "Producer",
    "ProducerSettings",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "QueueRange",
    "QueueSelector",
    "RaymqError",
    "RequestTimeoutError",
    "SendContext",
    "SendMessageHook",
    "SendResult",
    "SendStatus",
    "SendUnknownError",
    "ServiceNotAvailableError",
    "StoreCorruptError",
    "StoreError",
    "StoreFailedError",
    "StoreLockedError",
    "StoreNotWritableError",
    "SystemBusyError",
    "TableResult",
    "TopicExistsError",
    "TopicNotExistError",
    "__version__",
    "connect",
    "select_queue_by_hash",
    "select_queue_by_random",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'raymq' has no attribute {name!r}")
    value = getattr(import_module(f"raymq.{_module_of(name)}"), name)
    globals()[name] = value
    return value


_MODULES = {
    "AsyncProducer": "async_producer",
    "CheckForbiddenHook": "send_hooks",
    "AsyncPullConsumer": "async_consumer",
    "AllocateStrategy": "membership",
    "Allocation": "membership",
    "Client": "client",
    "ConsumeContext": "consume_hook",
    "ConsumeHook": "consume_hook",
    "ConsumeLater": "consume_result",
    "PullConsumer": "pull_consumer",
    "Compression": "compression",
    "CompressionType": "compression",
    "Producer": "producer",
    "ProducerSettings": "producer_settings",
    "QueueRange": "table_send",
    "QueueSelector": "queue_selection",
    "SendContext": "send_hooks",
    "SendMessageHook": "send_hooks",
    "TableResult": "table_send",
    "connect": "client",
    "select_queue_by_hash": "queue_selection",
    "select_queue_by_random": "queue_selection",
}
"""Where a public name is, unless it is an error's or a message's."""


def _module_of(name: str) -> str:
    return _MODULES.get(name) or ("errors" if name.endswith("Error") else "message")


def __dir__() -> list[str]:
    return sorted(__all__)
