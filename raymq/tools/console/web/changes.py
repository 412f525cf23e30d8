"""Changes: the one place that makes them, and that writes each into the audit, whether it succeeded or not.

The gate has let only admins through, from a page of this origin.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from raymq.common.errors import RaymqError
from raymq.tools.console.backend.audit import AuditEntry
from raymq.tools.console.backend.protocol import Backend
from raymq.tools.console.web.answers import redirect, wants_json
from raymq.tools.console.web.calls import LIST_TIMEOUT_S, PAGE_CHANGE_TIMEOUT_S
from raymq.tools.console.web.console import console_of, notify, user_of
from raymq.tools.console.web.texts import sentence

logger = logging.getLogger(__name__)


async def change(
    request: Request,
    action: str,
    arguments: Mapping[str, Any],
    call: Callable[[Backend], Any],
    *,
    then: str,
    done: str,
    after_failure: str = "",
) -> Response:
    """Make a change, write it into the audit, and go to the page `then`, which shows the sentence `done`; or, after a
    failure, to `after_failure`, by default `then`, which shows the error.

    `action` is a few words, as `raymq` has them: "topic create". `arguments` with value None are left out of the audit;
    none may hold a body or a token. A script gets the outcome as JSON.
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


async def audited(request: Request, action: str, arguments: Mapping[str, Any], call: Callable[[Backend], Any]) -> Any:
    """The result of a call that changes something; its outcome is in the audit then. Raises as the call does."""
    console = console_of(request)
    outcome = "an error of the console itself; its log has more"
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
    """Write a change that was tried into the audit. If the cluster does not take it, the console's log has it, and the
    next page says so: the change itself has happened."""
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
        await console.calls.call(lambda backend: backend.record_audit(entry), LIST_TIMEOUT_S, about="the audit")
    except RaymqError as error:
        logger.warning("the audit has no entry of %s: %s", entry, error)
        notify(request, "failed", f"The audit has no entry of this change: {error}")
