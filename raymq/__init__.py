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
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # for type checkers, which do not run __getattr__; a test compares it with _HOMES
    from raymq.access.credentials import Credentials as Credentials
    from raymq.client import Client as Client, connect as connect
    from raymq.consumer.pull.async_consumer import AsyncPullConsumer as AsyncPullConsumer
    from raymq.consumer.pull.consumer import PullConsumer as PullConsumer
    from raymq.consumer.push.hook import ConsumeContext as ConsumeContext, ConsumeHook as ConsumeHook
    from raymq.consumer.simple.async_consumer import AsyncSimpleConsumer as AsyncSimpleConsumer
    from raymq.consumer.simple.consumer import SimpleConsumer as SimpleConsumer
    from raymq.consumer.simple.received_message import ReceivedMessage as ReceivedMessage
    from raymq.errors import (
        AccessDeniedError as AccessDeniedError,
        AuthenticationError as AuthenticationError,
        BodyUnreadableError as BodyUnreadableError,
        ClientStateError as ClientStateError,
        ClusterNotFoundError as ClusterNotFoundError,
        ConfigError as ConfigError,
        CreateReplyMessageError as CreateReplyMessageError,
        DataLossError as DataLossError,
        FilterExpressionError as FilterExpressionError,
        GroupNotExistError as GroupNotExistError,
        IllegalNameError as IllegalNameError,
        InSyncReplicasError as InSyncReplicasError,
        InvalidArgumentError as InvalidArgumentError,
        ListenerError as ListenerError,
        MessageIllegalError as MessageIllegalError,
        MessageRefusedError as MessageRefusedError,
        NoPermissionError as NoPermissionError,
        NotMasterError as NotMasterError,
        OffsetOutOfRangeError as OffsetOutOfRangeError,
        PolicyNotExistError as PolicyNotExistError,
        PredicateFailedError as PredicateFailedError,
        QuotaExceededError as QuotaExceededError,
        RaymqError as RaymqError,
        RecallError as RecallError,
        ReceiptExpiredError as ReceiptExpiredError,
        RequesterGoneError as RequesterGoneError,
        RequestTimeoutError as RequestTimeoutError,
        SendUnknownError as SendUnknownError,
        ServiceNotAvailableError as ServiceNotAvailableError,
        SignedTooEarlyError as SignedTooEarlyError,
        StoreCorruptError as StoreCorruptError,
        StoreError as StoreError,
        StoreFailedError as StoreFailedError,
        StoreLockedError as StoreLockedError,
        StoreNotWritableError as StoreNotWritableError,
        SubscriptionConflictError as SubscriptionConflictError,
        SystemBusyError as SystemBusyError,
        TopicExistsError as TopicExistsError,
        TopicNotExistError as TopicNotExistError,
        TransactionError as TransactionError,
        TransactionTooLateError as TransactionTooLateError,
        UserNotExistError as UserNotExistError,
    )
    from raymq.filters.sql import SqlFilter as SqlFilter, sql as sql
    from raymq.hooks import FetchedBatch as FetchedBatch, HookedBatch as HookedBatch, PutBatch as PutBatch
    from raymq.log_handler import RaymqHandler as RaymqHandler
    from raymq.message import (
        ConsumeFromWhere as ConsumeFromWhere,
        ConsumeStatus as ConsumeStatus,
        Message as Message,
        MessageExt as MessageExt,
        MessageModel as MessageModel,
        MessageQueue as MessageQueue,
        PullResult as PullResult,
        PullStatus as PullStatus,
        SendResult as SendResult,
        SendStatus as SendStatus,
    )
    from raymq.names import light_queue as light_queue
    from raymq.predicates.predicate import Predicate as Predicate, predicate as predicate
    from raymq.producer.async_producer import AsyncProducer as AsyncProducer
    from raymq.producer.hooks import (
        CheckForbiddenHook as CheckForbiddenHook,
        SendContext as SendContext,
        SendMessageHook as SendMessageHook,
    )
    from raymq.producer.producer import Producer as Producer
    from raymq.producer.queue_selector import (
        QueueSelector as QueueSelector,
        select_queue_by_hash as select_queue_by_hash,
        select_queue_by_random as select_queue_by_random,
    )
    from raymq.producer.settings import ProducerSettings as ProducerSettings
    from raymq.producer.table import QueueRange as QueueRange, TableResult as TableResult
    from raymq.protocol.attributes import TopicMessageType as TopicMessageType
    from raymq.protocol.consume_result import ConsumeLater as ConsumeLater
    from raymq.protocol.membership import AllocateStrategy as AllocateStrategy, Allocation as Allocation
    from raymq.protocol.request_reply import Reply as Reply, reply as reply
    from raymq.protocol.transactions import LocalTransactionState as LocalTransactionState
    from raymq.record.compression import Compression as Compression, CompressionType as CompressionType
    from raymq.transactions.producer import (
        Transaction as Transaction,
        TransactionProducer as TransactionProducer,
        TransactionSendResult as TransactionSendResult,
    )

__version__ = "0.1.0"

_HOMES: Final = {
    "AccessDeniedError": "raymq.errors",
    "AuthenticationError": "raymq.errors",
    "PolicyNotExistError": "raymq.errors",
    "QuotaExceededError": "raymq.errors",
    "SignedTooEarlyError": "raymq.errors",
    "UserNotExistError": "raymq.errors",
    "Credentials": "raymq.access.credentials",
    "AllocateStrategy": "raymq.protocol.membership",
    "Allocation": "raymq.protocol.membership",
    "AsyncProducer": "raymq.producer.async_producer",
    "AsyncPullConsumer": "raymq.consumer.pull.async_consumer",
    "AsyncSimpleConsumer": "raymq.consumer.simple.async_consumer",
    "CheckForbiddenHook": "raymq.producer.hooks",
    "Client": "raymq.client",
    "BodyUnreadableError": "raymq.errors",
    "ClientStateError": "raymq.errors",
    "ClusterNotFoundError": "raymq.errors",
    "Compression": "raymq.record.compression",
    "CompressionType": "raymq.record.compression",
    "ConfigError": "raymq.errors",
    "ConsumeContext": "raymq.consumer.push.hook",
    "ConsumeFromWhere": "raymq.message",
    "ConsumeHook": "raymq.consumer.push.hook",
    "ConsumeLater": "raymq.protocol.consume_result",
    "ConsumeStatus": "raymq.message",
    "CreateReplyMessageError": "raymq.errors",
    "DataLossError": "raymq.errors",
    "FetchedBatch": "raymq.hooks",
    "FilterExpressionError": "raymq.errors",
    "GroupNotExistError": "raymq.errors",
    "HookedBatch": "raymq.hooks",
    "IllegalNameError": "raymq.errors",
    "InSyncReplicasError": "raymq.errors",
    "InvalidArgumentError": "raymq.errors",
    "ListenerError": "raymq.errors",
    "LocalTransactionState": "raymq.protocol.transactions",
    "Message": "raymq.message",
    "MessageExt": "raymq.message",
    "MessageIllegalError": "raymq.errors",
    "MessageModel": "raymq.message",
    "MessageQueue": "raymq.message",
    "MessageRefusedError": "raymq.errors",
    "NoPermissionError": "raymq.errors",
    "NotMasterError": "raymq.errors",
    "OffsetOutOfRangeError": "raymq.errors",
    "Predicate": "raymq.predicates.predicate",
    "PredicateFailedError": "raymq.errors",
    "Producer": "raymq.producer.producer",
    "ProducerSettings": "raymq.producer.settings",
    "PullConsumer": "raymq.consumer.pull.consumer",
    "PullResult": "raymq.message",
    "PullStatus": "raymq.message",
    "PutBatch": "raymq.hooks",
    "QueueRange": "raymq.producer.table",
    "QueueSelector": "raymq.producer.queue_selector",
    "RaymqError": "raymq.errors",
    "RaymqHandler": "raymq.log_handler",
    "RecallError": "raymq.errors",
    "Reply": "raymq.protocol.request_reply",
    "ReceiptExpiredError": "raymq.errors",
    "ReceivedMessage": "raymq.consumer.simple.received_message",
    "RequestTimeoutError": "raymq.errors",
    "RequesterGoneError": "raymq.errors",
    "SendContext": "raymq.producer.hooks",
    "SendMessageHook": "raymq.producer.hooks",
    "SendResult": "raymq.message",
    "SendStatus": "raymq.message",
    "SendUnknownError": "raymq.errors",
    "ServiceNotAvailableError": "raymq.errors",
    "SimpleConsumer": "raymq.consumer.simple.consumer",
    "StoreCorruptError": "raymq.errors",
    "StoreError": "raymq.errors",
    "StoreFailedError": "raymq.errors",
    "StoreLockedError": "raymq.errors",
    "StoreNotWritableError": "raymq.errors",
    "SubscriptionConflictError": "raymq.errors",
    "SystemBusyError": "raymq.errors",
    "SqlFilter": "raymq.filters.sql",
    "TableResult": "raymq.producer.table",
    "TopicExistsError": "raymq.errors",
    "TopicMessageType": "raymq.protocol.attributes",
    "TopicNotExistError": "raymq.errors",
    "Transaction": "raymq.transactions.producer",
    "TransactionError": "raymq.errors",
    "TransactionProducer": "raymq.transactions.producer",
    "TransactionSendResult": "raymq.transactions.producer",
    "TransactionTooLateError": "raymq.errors",
    "connect": "raymq.client",
    "light_queue": "raymq.names",
    "predicate": "raymq.predicates.predicate",
    "reply": "raymq.protocol.request_reply",
    "select_queue_by_hash": "raymq.producer.queue_selector",
    "select_queue_by_random": "raymq.producer.queue_selector",
    "sql": "raymq.filters.sql",
}
"""The module that defines each public name."""

__all__ = sorted({*_HOMES, "__version__"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raymq' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
