"""The enumerations of RocketMQ 5's gRPC protocol, by number.

A field of a message may have a number without a name here, because newer clients have newer numbers. So fields are
plain integers, and these classes only name the numbers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class TransactionResolution(IntEnum):
    """How a transaction ends."""

    TRANSACTION_RESOLUTION_UNSPECIFIED = 0
    COMMIT = 1
    ROLLBACK = 2


class TransactionSource(IntEnum):
    """The reason why a client ends a transaction: its own decision, or a check by the server."""

    SOURCE_UNSPECIFIED = 0
    SOURCE_CLIENT = 1
    SOURCE_SERVER_CHECK = 2


class Permission(IntEnum):
    """The permitted access to a queue."""

    PERMISSION_UNSPECIFIED = 0
    NONE = 1
    READ = 2
    WRITE = 3
    READ_WRITE = 4


class FilterType(IntEnum):
    """The language of a filter expression."""

    FILTER_TYPE_UNSPECIFIED = 0
    TAG = 1
    SQL = 2


class AddressScheme(IntEnum):
    """The kind of the host in an address."""

    ADDRESS_SCHEME_UNSPECIFIED = 0
    IPv4 = 1
    IPv6 = 2
    DOMAIN_NAME = 3


class MessageType(IntEnum):
    """The kind of a message, and the kinds that a queue accepts."""

    MESSAGE_TYPE_UNSPECIFIED = 0
    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    LITE = 5
    PRIORITY = 6


class DigestType(IntEnum):
    """The algorithm of a digest of a body."""

    DIGEST_TYPE_UNSPECIFIED = 0
    CRC32 = 1
    MD5 = 2
    SHA1 = 3


class ClientType(IntEnum):
    """The kind of a client."""

    CLIENT_TYPE_UNSPECIFIED = 0
    PRODUCER = 1
    PUSH_CONSUMER = 2
    SIMPLE_CONSUMER = 3
    PULL_CONSUMER = 4
    LITE_PUSH_CONSUMER = 5
    LITE_SIMPLE_CONSUMER = 6


class Encoding(IntEnum):
    """The compression of a body."""

    ENCODING_UNSPECIFIED = 0
    IDENTITY = 1
    GZIP = 2


class QueryOffsetPolicy(IntEnum):
    """The position for which a client queries the offset."""

    BEGINNING = 0
    END = 1
    TIMESTAMP = 2


class Language(IntEnum):
    """The programming language of a client."""

    LANGUAGE_UNSPECIFIED = 0
    JAVA = 1
    CPP = 2
    DOT_NET = 3
    GOLANG = 4
    RUST = 5
    PYTHON = 6
    PHP = 7
    NODE_JS = 8
    RUBY = 9
    OBJECTIVE_C = 10
    DART = 11
    KOTLIN = 12


class LiteSubscriptionAction(IntEnum):
    """The change of a subscription to lite topics."""

    PARTIAL_ADD = 0
    PARTIAL_REMOVE = 1
    COMPLETE_ADD = 2
    COMPLETE_REMOVE = 3


class Code(IntEnum):
    """The outcome of a call, in the field `status` of each answer. The first three digits are HTTP's."""

    CODE_UNSPECIFIED = 0
    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    ILLEGAL_OFFSET = 40019
    ILLEGAL_LITE_TOPIC = 40020
    INVALID_CLIENT_PROPERTIES = 40021
    UNAUTHORIZED = 40100
    PAYMENT_REQUIRED = 40200
    FORBIDDEN = 40300
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    OFFSET_NOT_FOUND = 40404
    REQUEST_TIMEOUT = 40800
    PAYLOAD_TOO_LARGE = 41300
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900
    LITE_TOPIC_QUOTA_EXCEEDED = 42901
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902
    REQUEST_HEADER_FIELDS_TOO_LARGE = 43100
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_ERROR = 50000
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    PROXY_TIMEOUT = 50400
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402
    UNSUPPORTED = 50500
    VERSION_UNSUPPORTED = 50501
    VERIFY_FIFO_MESSAGE_UNSUPPORTED = 50502
    FAILED_TO_CONSUME_MESSAGE = 60000


class Policy(IntEnum):
    """The position of an OffsetOption, relative to a queue."""

    LAST = 0
    MIN = 1
    MAX = 2


ENUMS: Final[tuple[type[IntEnum], ...]] = (
    TransactionResolution,
    TransactionSource,
    Permission,
    FilterType,
    AddressScheme,
    MessageType,
    DigestType,
    ClientType,
    Encoding,
    QueryOffsetPolicy,
    Language,
    LiteSubscriptionAction,
    Code,
)
"""The enumerations of the protocol's package. Policy is not one of these, because the protocol defines it inside the
message OffsetOption."""
