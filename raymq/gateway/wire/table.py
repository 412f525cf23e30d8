"""The table of RocketMQ 5's gRPC messages: the number, name and type of each field, and the calls of the service.

The module has no code of protobuf. `messages.py` makes classes of the table; the tests write messages.pyi, the types of
these classes, from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

PACKAGE: Final = "apache.rocketmq.v2"
"""The name of the protocol's package. It is part of the path of each call."""
SERVICE: Final = f"{PACKAGE}.MessagingService"

TABLE: Final = """
# Names, addresses and queues
Resource: 1 resource_namespace str, 2 name str
Address: 1 host str, 2 port i32
Endpoints: 1 scheme AddressScheme, 2 addresses [Address]
Broker: 1 name str, 2 id i32, 3 endpoints Endpoints
MessageQueue: 1 topic Resource, 2 id i32, 3 permission Permission, 4 broker Broker,
  5 accept_message_types [MessageType]
Assignment: 1 message_queue MessageQueue
FilterExpression: 1 type FilterType, 2 expression str
SubscriptionEntry: 1 topic Resource, 2 expression FilterExpression
OffsetOption has one offset_type: 1 policy Policy|, 2 offset i64|, 3 tail_n i64|, 4 timestamp i64|

# Messages
Message: 1 topic Resource, 2 user_properties {str}, 3 system_properties SystemProperties, 4 body bytes
SystemProperties: 1 tag str?, 2 keys [str], 3 message_id str, 4 body_digest Digest, 5 body_encoding Encoding,
  6 message_type MessageType, 7 born_timestamp Timestamp, 8 born_host str, 9 store_timestamp Timestamp?,
  10 store_host str, 11 delivery_timestamp Timestamp?, 12 receipt_handle str?, 13 queue_id i32,
  14 queue_offset i64?, 15 invisible_duration Duration?, 16 delivery_attempt i32?, 17 message_group str?,
  18 trace_context str?, 19 orphaned_transaction_recovery_duration Duration?,
  20 dead_letter_queue DeadLetterQueue?, 21 lite_topic str?, 22 priority i32?
Digest: 1 type DigestType, 2 checksum str
DeadLetterQueue: 1 topic str, 2 message_id str

# Settings of clients
Settings has one pub_sub: 1 client_type ClientType?, 2 access_point Endpoints?, 3 backoff_policy RetryPolicy?,
  4 request_timeout Duration?, 5 publishing Publishing|, 6 subscription Subscription|, 7 user_agent UA,
  8 metric Metric, 9 client_properties {str}
Publishing: 1 topics [Resource], 2 max_body_size i32, 3 validate_message_type bool
Subscription: 1 group Resource?, 2 subscriptions [SubscriptionEntry], 3 fifo bool?, 4 receive_batch_size i32?,
  5 long_polling_timeout Duration?, 6 lite_subscription_quota i32?, 7 max_lite_topic_size i32?
RetryPolicy has one strategy: 1 max_attempts i32, 2 exponential_backoff ExponentialBackoff|,
  3 customized_backoff CustomizedBackoff|
ExponentialBackoff: 1 initial Duration, 2 max Duration, 3 multiplier float
CustomizedBackoff: 1 next [Duration]
Metric: 1 on bool, 2 endpoints Endpoints?
UA: 1 language Language, 2 version str, 3 platform str, 4 hostname str

# Routes
QueryRouteRequest: 1 topic Resource, 2 endpoints Endpoints
QueryRouteResponse: 1 status Status, 2 message_queues [MessageQueue]
QueryAssignmentRequest: 1 topic Resource, 2 group Resource, 3 endpoints Endpoints
QueryAssignmentResponse: 1 status Status, 2 assignments [Assignment]

# Clients that come and go
HeartbeatRequest: 1 group Resource?, 2 client_type ClientType
HeartbeatResponse: 1 status Status
NotifyClientTerminationRequest: 1 group Resource?
NotifyClientTerminationResponse: 1 status Status

# Sending
SendMessageRequest: 1 messages [Message]
SendMessageResponse: 1 status Status, 2 entries [SendResultEntry]
SendResultEntry: 1 status Status, 2 message_id str, 3 transaction_id str, 4 offset i64, 5 recall_handle str
RecallMessageRequest: 1 topic Resource, 2 recall_handle str
RecallMessageResponse: 1 status Status, 2 message_id str
EndTransactionRequest: 1 topic Resource, 2 message_id str, 3 transaction_id str,
  4 resolution TransactionResolution, 5 source TransactionSource, 6 trace_context str
EndTransactionResponse: 1 status Status

# Receiving with leases
ReceiveMessageRequest: 1 group Resource, 2 message_queue MessageQueue, 3 filter_expression FilterExpression,
  4 batch_size i32, 5 invisible_duration Duration?, 6 auto_renew bool, 7 long_polling_timeout Duration?,
  8 attempt_id str?
ReceiveMessageResponse has one content: 1 status Status|, 2 message Message|, 3 delivery_timestamp Timestamp|
AckMessageRequest: 1 group Resource, 2 topic Resource, 3 entries [AckMessageEntry]
AckMessageEntry: 1 message_id str, 2 receipt_handle str, 3 lite_topic str?
AckMessageResponse: 1 status Status, 2 entries [AckMessageResultEntry]
AckMessageResultEntry: 1 message_id str, 2 receipt_handle str, 3 status Status
ChangeInvisibleDurationRequest: 1 group Resource, 2 topic Resource, 3 receipt_handle str,
  4 invisible_duration Duration, 5 message_id str, 6 lite_topic str?, 7 suspend bool?
ChangeInvisibleDurationResponse: 1 status Status, 2 receipt_handle str
ForwardMessageToDeadLetterQueueRequest: 1 group Resource, 2 topic Resource, 3 receipt_handle str,
  4 message_id str, 5 delivery_attempt i32, 6 max_delivery_attempts i32, 7 lite_topic str?
ForwardMessageToDeadLetterQueueResponse: 1 status Status

# Reading by offset
PullMessageRequest: 1 group Resource, 2 message_queue MessageQueue, 3 offset i64, 4 batch_size i32,
  5 filter_expression FilterExpression, 6 long_polling_timeout Duration
PullMessageResponse has one content: 1 status Status|, 2 message Message|, 3 next_offset i64|
UpdateOffsetRequest: 1 group Resource, 2 message_queue MessageQueue, 3 offset i64
UpdateOffsetResponse: 1 status Status
GetOffsetRequest: 1 group Resource, 2 message_queue MessageQueue
GetOffsetResponse: 1 status Status, 2 offset i64
QueryOffsetRequest: 1 message_queue MessageQueue, 2 query_offset_policy QueryOffsetPolicy,
  3 timestamp Timestamp?
QueryOffsetResponse: 1 status Status, 2 offset i64

# Lite topics
SyncLiteSubscriptionRequest: 1 action LiteSubscriptionAction, 2 topic Resource, 3 group Resource,
  4 lite_topic_set [str], 5 version i64?, 6 offset_option OffsetOption?
SyncLiteSubscriptionResponse: 1 status Status

# The stream of commands
TelemetryCommand has one command: 1 status Status?, 2 settings Settings|,
  3 thread_stack_trace ThreadStackTrace|, 4 verify_message_result VerifyMessageResult|,
  5 recover_orphaned_transaction_command RecoverOrphanedTransactionCommand|,
  6 print_thread_stack_trace_command PrintThreadStackTraceCommand|,
  7 verify_message_command VerifyMessageCommand|, 8 reconnect_endpoints_command ReconnectEndpointsCommand|,
  9 notify_unsubscribe_lite_command NotifyUnsubscribeLiteCommand|
RecoverOrphanedTransactionCommand: 1 message Message, 2 transaction_id str
PrintThreadStackTraceCommand: 1 nonce str
ThreadStackTrace: 1 nonce str, 2 thread_stack_trace str?
VerifyMessageCommand: 1 nonce str, 2 message Message
VerifyMessageResult: 1 nonce str
ReconnectEndpointsCommand: 1 nonce str
NotifyUnsubscribeLiteCommand: 1 lite_topic str

# The outcome of a call
Status: 1 code Code, 2 message str
"""
"""The messages of the package. Each message lists its fields: number, name and type.

A type is i32, i64, float, bool, str, bytes, a message, an enumeration, or Timestamp or Duration of google.protobuf. A
list of values is written as [type], and a map from text to text as {str}. A field with ? has presence: a receiver
can distinguish an absent field from an empty field. Fields with | exclude each other; after "has one", the message
names this group of fields.
"""


class FieldKind(Enum):
    """How often a field may occur in its message."""

    SINGLE = ""
    """Once. A value equal to the type's empty value is not sent."""
    OPTIONAL = "?"
    """Once or not at all. A receiver can distinguish an absent field from an empty field."""
    ONE_OF = "|"
    """Once, or not at all if another field of the message's group is present."""
    LIST = "[]"
    """Any number of times."""
    MAP = "{}"
    """Any number of times, with different keys."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a message. `type`: the type as in TABLE, without its marks."""

    number: int
    name: str
    type: str
    kind: FieldKind


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """One message. `group`: the name of the group of fields that exclude each other, or an empty text."""

    name: str
    group: str
    fields: tuple[FieldSpec, ...]


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """One call of the service. `request`, `response`: the names of its messages. `streams_requests`,
    `streams_responses`: whether the caller or the service sends any number of messages."""

    name: str
    request: str
    response: str
    streams_requests: bool = False
    streams_responses: bool = False


_FIELD: Final = re.compile(r"(\d+) (\w+) ([\[{]?)(\w+)([?|\]}]?)")
_MESSAGE: Final = re.compile(r"(\w+)(?: has one (\w+))?: (.*)")


def _field(text: str) -> FieldSpec:
    parts = _FIELD.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is no field")
    number, name, opening, type_name, mark = parts.groups()
    kind = FieldKind(opening + mark)
    return FieldSpec(int(number), name, type_name, kind)


def _message(text: str) -> MessageSpec:
    parts = _MESSAGE.fullmatch(text)
    if parts is None:
        raise ValueError(f"{text!r} is no message")
    name, group, fields = parts.groups()
    return MessageSpec(name, group or "", tuple(map(_field, fields.split(", "))))


MESSAGES: Final = tuple(
    _message(line) for line in TABLE.replace("\n  ", " ").splitlines() if line and not line.startswith("#")
)
"""The messages of TABLE, in its order."""

_UNARY: Final = """
    QueryRoute QueryAssignment Heartbeat NotifyClientTermination SendMessage RecallMessage EndTransaction AckMessage
    ChangeInvisibleDuration ForwardMessageToDeadLetterQueue UpdateOffset GetOffset QueryOffset SyncLiteSubscription
""".split()
_STREAMED: Final = ("ReceiveMessage", "PullMessage")

METHODS: Final = (
    *(MethodSpec(name, f"{name}Request", f"{name}Response") for name in _UNARY),
    *(MethodSpec(name, f"{name}Request", f"{name}Response", streams_responses=True) for name in _STREAMED),
    MethodSpec("Telemetry", "TelemetryCommand", "TelemetryCommand", streams_requests=True, streams_responses=True),
)
"""The calls of the service."""
