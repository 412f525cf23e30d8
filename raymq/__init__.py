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
    from raymq.client import Client, connect
    from raymq.compression import Compression, CompressionType
    from raymq.errors import (
        ClientStateError,
        ClusterNotFoundError,
        ConfigError,
        DataLossError,
        GroupNotExistError,
        IllegalNameError,
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

__version__ = "0.1.0"

__all__ = [
    "Client",
    "ClientStateError",
    "ClusterNotFoundError",
    "Compression",
    "CompressionType",
    "ConfigError",
    "ConsumeFromWhere",
    "ConsumeStatus",
    "DataLossError",
    "GroupNotExistError",
    "IllegalNameError",
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
    "PullResult",
    "PullStatus",
    "RaymqError",
    "RequestTimeoutError",
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
    "TopicExistsError",
    "TopicNotExistError",
    "__version__",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'raymq' has no attribute {name!r}")
    value = getattr(import_module(f"raymq.{_module_of(name)}"), name)
    globals()[name] = value
    return value


def _module_of(name: str) -> str:
    if name in ("Client", "connect"):
        return "client"
    if name.startswith("Compression"):
        return "compression"
    return "errors" if name.endswith("Error") else "message"


def __dir__() -> list[str]:
    return sorted(__all__)
