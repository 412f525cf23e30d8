"""raymq: a durable, replicated message queue inside a Ray cluster.

    with raymq.connect() as mq:
        mq.admin.create_topic("orders", queues=8)
        with mq.producer("order-service") as producer:
            producer.send(raymq.Message("orders", b"...", tags="paid", keys=["o-17"]))

Names are imported on first use (PEP 562), so that importing raymq is fast and requires neither Ray nor any other
server-side package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from raymq.common.former_names import accept_former_names

# Import the public names for type checkers, which do not run `__getattr__`. A test compares these imports with
# `_HOMES`.
if TYPE_CHECKING:
    from raymq.client.client import Client as Client, connect as connect
    from raymq.client.consumer.pull.async_consumer import AsyncPullConsumer as AsyncPullConsumer
    from raymq.client.consumer.pull.consumer import PullConsumer as PullConsumer
    from raymq.client.consumer.push.hook import ConsumeContext as ConsumeContext, ConsumeHook as ConsumeHook
    from raymq.client.consumer.simple.async_consumer import AsyncSimpleConsumer as AsyncSimpleConsumer
    from raymq.client.consumer.simple.consumer import SimpleConsumer as SimpleConsumer
    from raymq.client.consumer.simple.received_message import ReceivedMessage as ReceivedMessage
    from raymq.client.predicates.predicate import Predicate as Predicate, predicate as predicate
    from raymq.client.producer.async_producer import AsyncProducer as AsyncProducer
    from raymq.client.producer.hooks import (
        CheckForbiddenHook as CheckForbiddenHook,
        SendContext as SendContext,
        SendMessageHook as SendMessageHook,
    )
    from raymq.client.producer.producer import Producer as Producer
    from raymq.client.producer.queue_selector import (
        QueueSelector as QueueSelector,
        select_queue_by_hash as select_queue_by_hash,
        select_queue_by_random as select_queue_by_random,
    )
    from raymq.client.producer.settings import ProducerSettings as ProducerSettings
    from raymq.client.producer.table import QueueRange as QueueRange, TableResult as TableResult
    from raymq.client.transactions.producer import (
        Transaction as Transaction,
        TransactionProducer as TransactionProducer,
        TransactionSendResult as TransactionSendResult,
    )
    from raymq.common.errors import (
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
        MissingExtraError as MissingExtraError,
        NoListenerError as NoListenerError,
        NoPermissionError as NoPermissionError,
        NotMasterError as NotMasterError,
        NoTopicMatchesError as NoTopicMatchesError,
        OffsetOutOfRangeError as OffsetOutOfRangeError,
        PolicyNotExistError as PolicyNotExistError,
        PredicateFailedError as PredicateFailedError,
        QuotaExceededError as QuotaExceededError,
        RaymqError as RaymqError,
        RecallError as RecallError,
        ReceiptExpiredError as ReceiptExpiredError,
        RecordsDamagedError as RecordsDamagedError,
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
        TopicFullError as TopicFullError,
        TopicNotExistError as TopicNotExistError,
        TransactionError as TransactionError,
        TransactionTooLateError as TransactionTooLateError,
        UserNotExistError as UserNotExistError,
    )
    from raymq.common.message import (
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
    from raymq.common.names import light_queue as light_queue
    from raymq.common.protocol.attributes import TopicMessageType as TopicMessageType
    from raymq.common.protocol.consume_result import ConsumeLater as ConsumeLater
    from raymq.common.protocol.group import (
        GroupConfig as GroupConfig,
        exponential_intervals as exponential_intervals,
    )
    from raymq.common.protocol.membership import AllocateStrategy as AllocateStrategy, Allocation as Allocation
    from raymq.common.protocol.request_reply import Reply as Reply, reply as reply
    from raymq.common.protocol.transactions import LocalTransactionState as LocalTransactionState
    from raymq.log_handler import RaymqHandler as RaymqHandler
    from raymq.queue import Queue as Queue
    from raymq.records.filters.sql import SqlFilter as SqlFilter, sql as sql
    from raymq.records.format.compression import Compression as Compression, CompressionType as CompressionType
    from raymq.records.hooks import FetchedBatch as FetchedBatch, HookedBatch as HookedBatch, PutBatch as PutBatch
    from raymq.remoting.access.credentials import Credentials as Credentials

__version__ = "0.2.0"

accept_former_names()  # Accept former module names, because pickles and actors of an earlier raymq version use them.

_HOMES: Final = {
    "AccessDeniedError": "raymq.common.errors",
    "AuthenticationError": "raymq.common.errors",
    "PolicyNotExistError": "raymq.common.errors",
    "QuotaExceededError": "raymq.common.errors",
    "SignedTooEarlyError": "raymq.common.errors",
    "UserNotExistError": "raymq.common.errors",
    "Credentials": "raymq.remoting.access.credentials",
    "AllocateStrategy": "raymq.common.protocol.membership",
    "Allocation": "raymq.common.protocol.membership",
    "AsyncProducer": "raymq.client.producer.async_producer",
    "AsyncPullConsumer": "raymq.client.consumer.pull.async_consumer",
    "AsyncSimpleConsumer": "raymq.client.consumer.simple.async_consumer",
    "CheckForbiddenHook": "raymq.client.producer.hooks",
    "Client": "raymq.client.client",
    "BodyUnreadableError": "raymq.common.errors",
    "ClientStateError": "raymq.common.errors",
    "ClusterNotFoundError": "raymq.common.errors",
    "Compression": "raymq.records.format.compression",
    "CompressionType": "raymq.records.format.compression",
    "ConfigError": "raymq.common.errors",
    "ConsumeContext": "raymq.client.consumer.push.hook",
    "ConsumeFromWhere": "raymq.common.message",
    "ConsumeHook": "raymq.client.consumer.push.hook",
    "ConsumeLater": "raymq.common.protocol.consume_result",
    "ConsumeStatus": "raymq.common.message",
    "CreateReplyMessageError": "raymq.common.errors",
    "DataLossError": "raymq.common.errors",
    "FetchedBatch": "raymq.records.hooks",
    "FilterExpressionError": "raymq.common.errors",
    "GroupConfig": "raymq.common.protocol.group",
    "exponential_intervals": "raymq.common.protocol.group",
    "GroupNotExistError": "raymq.common.errors",
    "HookedBatch": "raymq.records.hooks",
    "IllegalNameError": "raymq.common.errors",
    "InSyncReplicasError": "raymq.common.errors",
    "InvalidArgumentError": "raymq.common.errors",
    "ListenerError": "raymq.common.errors",
    "LocalTransactionState": "raymq.common.protocol.transactions",
    "Message": "raymq.common.message",
    "MessageExt": "raymq.common.message",
    "MessageIllegalError": "raymq.common.errors",
    "MessageModel": "raymq.common.message",
    "MessageQueue": "raymq.common.message",
    "MessageRefusedError": "raymq.common.errors",
    "MissingExtraError": "raymq.common.errors",
    "NoListenerError": "raymq.common.errors",
    "NoPermissionError": "raymq.common.errors",
    "NoTopicMatchesError": "raymq.common.errors",
    "NotMasterError": "raymq.common.errors",
    "OffsetOutOfRangeError": "raymq.common.errors",
    "Predicate": "raymq.client.predicates.predicate",
    "PredicateFailedError": "raymq.common.errors",
    "Producer": "raymq.client.producer.producer",
    "ProducerSettings": "raymq.client.producer.settings",
    "PullConsumer": "raymq.client.consumer.pull.consumer",
    "PullResult": "raymq.common.message",
    "PullStatus": "raymq.common.message",
    "PutBatch": "raymq.records.hooks",
    "Queue": "raymq.queue",
    "QueueRange": "raymq.client.producer.table",
    "QueueSelector": "raymq.client.producer.queue_selector",
    "RaymqError": "raymq.common.errors",
    "RaymqHandler": "raymq.log_handler",
    "RecallError": "raymq.common.errors",
    "RecordsDamagedError": "raymq.common.errors",
    "Reply": "raymq.common.protocol.request_reply",
    "ReceiptExpiredError": "raymq.common.errors",
    "ReceivedMessage": "raymq.client.consumer.simple.received_message",
    "RequestTimeoutError": "raymq.common.errors",
    "RequesterGoneError": "raymq.common.errors",
    "SendContext": "raymq.client.producer.hooks",
    "SendMessageHook": "raymq.client.producer.hooks",
    "SendResult": "raymq.common.message",
    "SendStatus": "raymq.common.message",
    "SendUnknownError": "raymq.common.errors",
    "ServiceNotAvailableError": "raymq.common.errors",
    "SimpleConsumer": "raymq.client.consumer.simple.consumer",
    "StoreCorruptError": "raymq.common.errors",
    "StoreError": "raymq.common.errors",
    "StoreFailedError": "raymq.common.errors",
    "StoreLockedError": "raymq.common.errors",
    "StoreNotWritableError": "raymq.common.errors",
    "SubscriptionConflictError": "raymq.common.errors",
    "SystemBusyError": "raymq.common.errors",
    "SqlFilter": "raymq.records.filters.sql",
    "TableResult": "raymq.client.producer.table",
    "TopicExistsError": "raymq.common.errors",
    "TopicFullError": "raymq.common.errors",
    "TopicMessageType": "raymq.common.protocol.attributes",
    "TopicNotExistError": "raymq.common.errors",
    "Transaction": "raymq.client.transactions.producer",
    "TransactionError": "raymq.common.errors",
    "TransactionProducer": "raymq.client.transactions.producer",
    "TransactionSendResult": "raymq.client.transactions.producer",
    "TransactionTooLateError": "raymq.common.errors",
    "connect": "raymq.client.client",
    "light_queue": "raymq.common.names",
    "predicate": "raymq.client.predicates.predicate",
    "reply": "raymq.common.protocol.request_reply",
    "select_queue_by_hash": "raymq.client.producer.queue_selector",
    "select_queue_by_random": "raymq.client.producer.queue_selector",
    "sql": "raymq.records.filters.sql",
}
"""For each public name of the package raymq, the module that defines the name."""

__all__ = sorted({*_HOMES, "__version__"})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raymq' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
