"""The request of a web hook: its JSON, its headers, and its signature. Pure.

The headers follow the Standard Webhooks specification (standardwebhooks.com), so receivers can check a signature with
the specification's libraries:

    webhook-id          names the end of the task; a repeated call has the same id
    webhook-timestamp   the time of the call in s since 1970
    webhook-signature   v1,BASE64 of the HMAC-SHA256 over "ID.TIMESTAMP.BODY"; one for each key, with spaces between
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from msgspec import Meta, Struct, to_builtins

from raymq.common.errors import ConfigError
from raymq.serve.states import StateRecord

TASK_ENDED: Final = "task.ended"
RESULT_BYTES_MAX: Final = 16 * 1024
"""Maximum size in bytes, as JSON, of a result that a call carries."""
SECRET_PREFIX: Final = "whsec_"
"""Prefix of a key in base64, as in the specification."""
KEY_BYTES_MIN: Final = 16
KEYS_MAX: Final = 4
"""Maximum number of keys, so that receivers can change from an old key to a new one."""


class EndedTask(Struct, kw_only=True):
    """A task that has ended: SUCCESS, FAILURE or REVOKED. `result` is the handler's result, or the text of its error.
    A result of more than 16 KiB is left out, and `is_result_omitted` is true. Times are in s since 1970."""

    id: str
    queue: str
    state: str
    ended_at_s: float
    created_at_s: float | None
    attempt: int
    result: Any = None
    is_result_omitted: bool = False


class WebhookEvent(Struct, kw_only=True):
    """The body of a web hook's request."""

    type: Annotated[str, Meta(description="Always `task.ended`.")]
    timestamp: Annotated[str, Meta(description="Time of the task's end, ISO 8601.")]
    data: EndedTask


def task_ended(queue: str, state: StateRecord) -> WebhookEvent:
    """Return the event of a task's end. `queue`: the task queue, as the sender of the task named it."""
    is_long = len(json.dumps(state.result)) > RESULT_BYTES_MAX
    task = EndedTask(
        id=state.task_id,
        queue=queue,
        state=state.state.value,
        ended_at_s=state.at_s,
        created_at_s=state.created_at_s,
        attempt=state.attempt,
        result=None if is_long else state.result,
        is_result_omitted=is_long,
    )
    return WebhookEvent(type=TASK_ENDED, timestamp=datetime.fromtimestamp(state.at_s, UTC).isoformat(), data=task)


def event_id(event: WebhookEvent) -> str:
    """Return the id of an event. All calls about one end of a task have the same id."""
    return f"{event.data.id}-{event.data.state}-{round(event.data.ended_at_s * 1000)}"


def event_body(event: WebhookEvent) -> bytes:
    """Return the body of a request."""
    # not with msgspec: a result may have half of a surrogate pair, which JSON has only as an escape
    return json.dumps(to_builtins(event), separators=(",", ":")).encode()


def event_headers(event_name: str, body: bytes, keys: Sequence[bytes], now_s: float) -> dict[str, str]:
    """Return the headers of a request. `event_name`: the event's id. `keys`: the keys of the signatures; without a key
    the request is not signed. `now_s`: the time of the call in s since 1970."""
    at = str(int(now_s))
    headers = {"content-type": "application/json", "webhook-id": event_name, "webhook-timestamp": at}
    signed = f"{event_name}.{at}.".encode() + body
    signatures = [base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys]
    if signatures:
        headers["webhook-signature"] = " ".join(f"v1,{one}" for one in signatures)
    return headers


def parse_keys(text: str) -> list[bytes]:
    """Return the keys in a secret file: one for each line, as text, or as ``whsec_`` and base64. Raises ConfigError,
    without a key in its text, if the file has no key, too many, or a key that is too short."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not 1 <= len(lines) <= KEYS_MAX:
        raise ConfigError(f"the file of gateway.webhook_secret has {len(lines)} lines; it needs 1 to {KEYS_MAX} keys")
    try:
        keys = [
            base64.b64decode(line.removeprefix(SECRET_PREFIX), validate=True)
            if line.startswith(SECRET_PREFIX)
            else line.encode()
            for line in lines
        ]
    except binascii.Error:
        raise ConfigError(f"a key of gateway.webhook_secret begins with {SECRET_PREFIX} but is not base64") from None
    if min(map(len, keys)) < KEY_BYTES_MIN:
        raise ConfigError(f"a key of gateway.webhook_secret has fewer than {KEY_BYTES_MIN} bytes: use a longer one")
    return keys
