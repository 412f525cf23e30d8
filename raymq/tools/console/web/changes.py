"""Parses forms, makes changes, and writes each change with its outcome into the audit log.

All changes of the console are made by this module. The access check accepts changes only from admins, and only from a
page of this origin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from raymq.common.errors import InvalidArgumentError, RaymqError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.numbers import NOT_NEGATIVE, NumberRange, number_of_text
from raymq.tools.console.cluster import AuditEntry, ConsoleCluster
from raymq.tools.console.web.answers import redirect, wants_json
from raymq.tools.console.web.console import console_of, notify, user_of
from raymq.tools.console.web.snapshots import LIST_TIMEOUT_S, PAGE_CHANGE_TIMEOUT_S
from raymq.tools.console.web.texts import sentence

logger = logging.getLogger(__name__)

FORM_FIELDS_MAX: Final = 1_000
FORM_BODY_MAX_BYTES: Final = MAX_MESSAGE_SIZE_BYTES + 64 * 1024
"""Maximum number of bytes of a form field. The largest field is a message body."""


class Form:
    """The fields of a form, or of a URL's query string. Its methods raise InvalidArgumentError if a field is missing or
    invalid."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def text(self, name: str, default: str = "") -> str:
        """Return the text of a form field without surrounding white space; `default` if the field is empty."""
        return self._fields.get(name, default).strip() or default

    def raw(self, name: str) -> str:
        """Return the text of a form field exactly as the browser sent it."""
        return self._fields.get(name, "")

    def needed(self, name: str, label: str) -> str:
        """Return the text of a required form field. Raises InvalidArgumentError if the field is empty. `label`: the
        field's name in the error text."""
        text = self.text(name)
        if not text:
            raise InvalidArgumentError(f"{label} is missing")
        return text

    def number(self, name: str, label: str, bounds: NumberRange = NOT_NEGATIVE) -> int | None:
        """Return a form field as an integer; None for an empty field. Raises InvalidArgumentError if the text is not an
        integer within `bounds`. `label`: the field's name in the error text."""
        text = self.text(name)
        return number_of_text(label, text, bounds) if text else None

    def time_ms(self, name: str, label: str) -> int | None:
        """Return a form field with an ISO 8601 time, in ms since 1970; None for an empty field. The time is UTC unless
        it has a time zone."""
        text = self.text(name)
        if not text:
            return None
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            raise InvalidArgumentError(f"{label} must be a time such as 2026-11-23T08:00, not {text!r}") from None
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


async def form_of(
    request: Request, *, fields_max: int = FORM_FIELDS_MAX, field_max_bytes: int = FORM_BODY_MAX_BYTES
) -> Form:
    """Return the fields of the form that the browser has sent. If several fields have the same name, the last one
    counts. Raises HTTPException with status 400 if there are too many fields, or a field is too long."""
    async with request.form(max_files=0, max_fields=fields_max, max_part_size=field_max_bytes) as fields:
        return Form({name: value for name, value in fields.multi_items() if isinstance(value, str)})


def query_of(request: Request) -> Form:
    """Return the fields of the request's query string."""
    return Form(dict(request.query_params))


async def change(
    request: Request,
    action: str,
    arguments: Mapping[str, Any],
    call: Callable[[ConsoleCluster], Any],
    *,
    then: str,
    done: str,
    after_failure: str = "",
) -> Response:
    """Make a change, write it into the audit log, and redirect to the page `then`, which shows the sentence `done`.
    After a failure, the error is shown on the page `after_failure`, by default `then`.

    `action`: a few words, as in the commands of `raymq`: "topic create". `arguments` whose value is None are left out
    of the audit log; no argument may contain a message body or a token. A script gets the outcome as JSON.
    """
    try:
        await audited(request, action, arguments, call)
    except RaymqError as error:
        if wants_json(request):
            return JSONResponse({"outcome": str(error)}, 409)
        notify(request, "failed", sentence(str(error)))
        return redirect(request, after_failure or then)
    if wants_json(request):
        return JSONResponse({"outcome": "done"})
    notify(request, "done", done)
    return redirect(request, then)


async def audited(
    request: Request, action: str, arguments: Mapping[str, Any], call: Callable[[ConsoleCluster], Any]
) -> Any:
    """Make a call that changes the cluster, and write its outcome into the audit log. Returns the result of the call,
    or raises the error of the call."""
    console = console_of(request)
    outcome = "an internal error of the console; its log has the details"
    try:
        result = await console.calls.call(call, PAGE_CHANGE_TIMEOUT_S, about=action)
        outcome = "done"
    except RaymqError as error:
        outcome = str(error)
        raise
    finally:
        console.snapshots.forget()
        await write_audit(request, action, arguments, outcome)
    return result


async def write_audit(request: Request, action: str, arguments: Mapping[str, Any], outcome: str) -> None:
    """Write a change into the audit log, whether the change succeeded or failed. If the cluster does not store the
    entry, no error is raised. Instead the console writes the entry into its own log, and shows a notice on the next
    page that the user opens."""
    console, user = console_of(request), user_of(request)
    entry = AuditEntry(
        time.time_ns() // 1_000_000,
        user.name,
        user.role,
        user.address,
        action,
        {name: str(value) for name, value in arguments.items() if value is not None},
        outcome,
    )
    try:
        await console.calls.call(lambda cluster: cluster.control.record_audit(entry), LIST_TIMEOUT_S, about="the audit")
    except RaymqError as error:
        logger.warning("cannot write the change %s to the audit log: %s", entry, error)
        notify(request, "failed", f"This change could not be written to the audit log: {error}")
