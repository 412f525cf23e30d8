"""The JSON objects that pass the HTTP face: one class for each, from which the OpenAPI document is generated.

A body is text if it is UTF-8, else base64, because JSON has no bytes. Requests refuse unknown fields, so that a
misspelled name is an error. Answers leave out empty fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from raymq.common.config.webhook_hosts import URL_CHARACTERS_MAX
from raymq.common.message import PRIORITY_MAX, TIMER_DELAY_MAX_MS
from raymq.common.numbers import NUMBER_MAX, POINT_IN_TIME_MS
from raymq.common.protocol.pop import INVISIBLE_MAX_MS, INVISIBLE_MIN_MS
from raymq.gateway.convert.client_settings import LONG_POLLING_MS, RECEIVE_BATCH_SIZE

RECEIPTS_MAX: Final = 1024
"""Maximum number of receipts in one acknowledgement."""

Delay = Annotated[float, Meta(ge=0, le=TIMER_DELAY_MAX_MS / 1000, description="Seconds before the delivery.")]
DeliverAt = Annotated[
    int, Meta(ge=int(POINT_IN_TIME_MS.low), le=NUMBER_MAX, description="Time of the delivery in ms since 1970.")
]
Priority = Annotated[int, Meta(ge=0, le=PRIORITY_MAX, description="0 is the lowest; for topics of the type PRIORITY.")]
Base64 = Annotated[bytes, Meta(description="Any bytes, in base64.")]


class NewMessage(Struct, kw_only=True, forbid_unknown_fields=True):
    """A message to send. It has either a `body` or a `body_base64`. A repeated send with the same `message_id` and the
    same content, within 30 s, stores no second message. Without an id, the gateway makes one."""

    body: Annotated[str, Meta(description="The body as text, which is stored as UTF-8.")] | None = None
    body_base64: Base64 | None = None
    tag: str | None = None
    keys: Annotated[list[str], Meta(description="Business keys, for lookups.")] = []
    properties: dict[str, str] = {}
    sharding_key: Annotated[str, Meta(description="Messages with one key are delivered in order.")] | None = None
    message_id: str | None = None
    delay_s: Delay | None = None
    deliver_at_ms: DeliverAt | None = None
    priority: Priority | None = None


class SentMessage(Struct, kw_only=True):
    """A stored message. If `code` is not OK, the message is less durable than its topic's settings promise."""

    message_id: str
    offset: Annotated[int, Meta(description="The message's offset in its queue.")]
    code: str
    recall_handle: Annotated[str, Meta(description="Recalls a delayed message; else empty.")] = ""


class SendAnswer(Struct, kw_only=True):
    """The stored messages of a send, in its order."""

    messages: list[SentMessage]


class LeaseRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Leases messages of a topic for a consumer group. A message that is not acknowledged within `invisible_s` is
    delivered again. `tags` and `sql` select messages; give one of them."""

    topic: str
    max_messages: Annotated[int, Meta(ge=1, le=RECEIVE_BATCH_SIZE)] = RECEIVE_BATCH_SIZE
    invisible_s: Annotated[float, Meta(ge=INVISIBLE_MIN_MS / 1000, le=INVISIBLE_MAX_MS / 1000)] = 60.0
    wait_s: Annotated[float, Meta(ge=0, le=LONG_POLLING_MS / 1000, description="Wait for the first message.")] = 0.0
    tags: Annotated[str, Meta(description="Such as `paid || refunded`; `*` selects all messages.")] = "*"
    sql: Annotated[str, Meta(description="A condition, such as `price > 5`.")] = ""


class StoredMessage(Struct, kw_only=True, omit_defaults=True):
    """A message of a topic. It has a `body` if its body is UTF-8, else a `body_base64`."""

    message_id: str
    topic: str
    queue_id: int
    offset: int
    born_at_ms: int
    stored_at_ms: int
    body: str | None = None
    body_base64: Base64 | None = None
    tag: str = ""
    keys: list[str] = []
    properties: dict[str, str] = {}
    sharding_key: str = ""
    deliver_at_ms: int = 0
    priority: int | None = None


class LeasedMessage(StoredMessage, kw_only=True, omit_defaults=True):
    """A received message. Its `receipt` settles it. `attempt` is 1 for the first delivery."""

    receipt: str
    attempt: int


class LeaseAnswer(Struct, kw_only=True):
    """The received messages; an empty list if none arrived in time."""

    messages: list[LeasedMessage]


class AckRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Acknowledges messages, so that they are not delivered to the group again."""

    topic: str
    receipts: Annotated[list[str], Meta(min_length=1, max_length=RECEIPTS_MAX)]


class AckResult(Struct, kw_only=True, omit_defaults=True):
    """The result of one receipt. `message` is the reason if `code` is not OK."""

    receipt: str
    code: str
    message: str = ""


class AckAnswer(Struct, kw_only=True):
    """The result of each receipt, in the order of the request."""

    results: list[AckResult]


class ChangeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Changes the time until a received message is delivered again; 0 delivers the message at once."""

    topic: str
    receipt: str
    invisible_s: Annotated[float, Meta(ge=0, le=INVISIBLE_MAX_MS / 1000)]


class ChangeAnswer(Struct, kw_only=True):
    """The message's new receipt. The former receipt no longer settles the message."""

    receipt: str


class Skipped(Struct, kw_only=True):
    """Messages of a tail that the viewer does not get, because they arrived too fast or exceed the user's quota."""

    count: int


class NewTask(Struct, kw_only=True, forbid_unknown_fields=True):
    """A task for the Ray Serve deployment of a task queue. `name` is its handler's name. `priority` is for queues with
    priorities. `result_topic` is given if the deployment has its own. `webhook` is a URL that the gateway calls at the
    task's end."""

    queue: str
    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    sharding_key: str | None = None
    delay_s: Delay | None = None
    deliver_at_ms: DeliverAt | None = None
    priority: Priority | None = None
    result_topic: str | None = None
    webhook: Annotated[str, Meta(max_length=URL_CHARACTERS_MAX)] | None = None


class TaskAnswer(Struct, kw_only=True):
    """The state of a task: PENDING, STARTED, RETRY, SUCCESS, FAILURE or REVOKED. `result` is the handler's result, or
    the text of its error. Times are in s since 1970."""

    id: str
    state: str
    at_s: float
    created_at_s: float | None
    attempt: int
    result: Any = None


class ErrorAnswer(Struct, kw_only=True):
    """Why a request failed (RFC 9457). `title` and `code` are the status that gRPC clients get for the same error."""

    title: str
    status: int
    code: int
    detail: str
