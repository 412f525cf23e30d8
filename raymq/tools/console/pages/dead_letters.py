"""`/groups/G/dead-letters`: the page of dead letters, which are messages that a group could not consume. Users can
replay all letters or selected letters, and see the progress."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from raymq.client.admin.admin import Admin
from raymq.client.admin.dead_letters import DeadLetter, LetterPlace
from raymq.common.errors import GroupNotExistError, InvalidArgumentError, RaymqError
from raymq.common.numbers import RATE, real_number
from raymq.common.places import parse_position
from raymq.tools.console.messages.export import rows_as_file
from raymq.tools.console.messages.fields import MESSAGE_COLUMNS, file_rows, row_of
from raymq.tools.console.messages.replays import REPLAY_RATE_MAX, LetterReplay
from raymq.tools.console.messages.search import bodies_shown
from raymq.tools.console.web.answers import page, redirect
from raymq.tools.console.web.changes import FORM_FIELDS_MAX, write_audit
from raymq.tools.console.web.console import console_of, notify, user_of
from raymq.tools.console.web.texts import segment

LETTERS_SHOWN: Final = 50
LETTERS_EXPORTED: Final = 1_000
LETTER_COLUMNS: Final = ("died_ms", "attempts", "replayed", *MESSAGE_COLUMNS)


async def show(request: Request) -> Response:
    """Show a group's dead letters, oldest first, each with a checkbox. If the letters cannot be read, the error is
    shown as a line above them. Raises GroupNotExistError if the group does not exist."""
    group, replayed = request.path_params["group"], "replayed" in request.query_params
    letters: list[DeadLetter] = []
    cursor, error = None, ""
    try:
        letters, cursor = await _letters(request, LETTERS_SHOWN)
    except GroupNotExistError:
        raise
    except RaymqError as problem:
        error = str(problem)
    with_body = _with_body(request)
    values = {
        "group": group,
        "replayed": replayed,
        "rows": [(letter, row_of(letter.message, with_body=with_body)) for letter in letters],
        "cursor": cursor,
        "error": error,
        "replay": console_of(request).replays.of(group),
    }
    return page(request, "dead_letters.html", values)


async def export(request: Request) -> Response:
    """Return a group's dead letters as a file: at most LETTERS_EXPORTED letters, beginning with the first letter of the
    displayed page."""
    letters, _ = await _letters(request, LETTERS_EXPORTED)
    rows = _file_rows(letters, with_body=_with_body(request))
    return rows_as_file(request, f"dead-letters-{request.path_params['group']}", LETTER_COLUMNS, rows)


async def as_json(request: Request) -> Response:
    """Return a page of a group's dead letters as JSON, for scripts."""
    letters, cursor = await _letters(request, LETTERS_SHOWN)
    return JSONResponse({"dead_letters": _file_rows(letters, with_body=_with_body(request)), "cursor": cursor})


async def start(request: Request) -> Response:
    """Start a replay of a group's dead letters, either of all letters or of the selected letters. Show the progress of
    the replay."""
    group = request.path_params["group"]
    back, progress = (f"/groups/{segment(group)}/dead-letters{more}" for more in ("", "/replay"))
    arguments: dict[str, Any] = {"group": group}
    try:
        places, rate = await _choice(request, group)
        arguments |= {"letters": "all" if places is None else len(places), "rate": rate}
        replay = LetterReplay(
            group, user_of(request).name, None if places is None else len(places), rate, time.monotonic()
        )
        console = console_of(request)
        console.replays.start(
            replay,
            lambda: console.calls.cluster.admin.dead_letters(group).replay(rate=rate, letters=places),
            partial(_audit_from_thread, asyncio.get_running_loop(), request, arguments),
        )
    except RaymqError as error:
        notify(request, "failed", str(error))
        return redirect(request, back)
    return redirect(request, progress)


async def progress(request: Request) -> Response:
    """Show the progress of the group's last replay of dead letters, and the result of each letter."""
    group = request.path_params["group"]
    replay = console_of(request).replays.of(group)
    results = list(replay.results) if replay else []
    return page(request, "replay.html", {"group": group, "replay": replay, "results": results})


async def stop(request: Request) -> Response:
    """Stop the group's replay of dead letters after the letter that it currently sends."""
    group = request.path_params["group"]
    replay = console_of(request).replays.of(group)
    if replay is not None and replay.running:
        replay.stopping = True
        await write_audit(request, "dead letters stop", {"group": group}, "done")
    return redirect(request, f"/groups/{segment(group)}/dead-letters/replay")


def _audit_from_thread(
    loop: asyncio.AbstractEventLoop, request: Request, arguments: dict[str, Any], replay: LetterReplay
) -> None:
    """Write the outcome of a replay of dead letters to the audit log, from the replay's own thread."""
    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(write_audit(request, "dead letters replay", arguments, replay.outcome), loop)


async def _choice(request: Request, group: str) -> tuple[list[LetterPlace] | None, float | None]:
    """Return the dead letters that the user selected in the form (None for all) and the replay rate. Raises
    InvalidArgumentError if no letter is selected, or if the form contains an invalid value."""
    async with request.form(max_files=0, max_fields=FORM_FIELDS_MAX) as fields:
        which, texts = fields.get("which"), [text for text in fields.getlist("letter") if isinstance(text, str)]
        rate = _rate(str(fields.get("rate", "")).strip())
    if which == "all":
        return None, rate
    if not texts:
        raise InvalidArgumentError("no dead letter is selected: select some, or replay all")
    places = [parse_position(group, text) for text in texts]
    return [LetterPlace(queue.broker_name, queue.queue_id, offset) for queue, offset in places], rate


def _rate(text: str) -> float | None:
    """Parse the replay rate per second in the form; returns None for an empty text. Raises InvalidArgumentError if the
    text is not a valid rate."""
    if not text:
        return None
    try:
        rate: object = float(text)
    except ValueError:
        rate = text
    return real_number("the rate", rate, RATE.low, REPLAY_RATE_MAX)


async def _letters(request: Request, limit: int) -> tuple[list[DeadLetter], str | None]:
    """Read at most `limit` dead letters from the cluster, starting at the cursor in the URL. Also returns the cursor of
    the next page."""
    group, query = request.path_params["group"], request.query_params
    after, replayed = _place(query.get("cursor")), "replayed" in query
    return await console_of(request).ask(
        lambda cluster: letters_after(cluster.admin, group, after, replayed=replayed, limit=limit)
    )


def letters_after(
    admin: Admin, group: str, after: LetterPlace | None, *, replayed: bool, limit: int
) -> tuple[list[DeadLetter], str | None]:
    """Return at most `limit` dead letters of a group, oldest first, and the cursor of the next page.

    `after`: identifies the last dead letter of the previous page; None for the first page. The returned cursor is None
    if there are no more dead letters. Raises GroupNotExistError.
    """
    found = list(islice(admin.dead_letters(group).behind(after, replayed=replayed), limit + 1))
    letters = found[:limit]
    return letters, json.dumps(letters[-1].place) if len(found) > limit else None


def _place(cursor: str | None) -> LetterPlace | None:
    """Parse a cursor of `letters_after`; returns None for an empty cursor. Raises InvalidArgumentError if the cursor is
    invalid."""
    if not cursor:
        return None
    try:
        name, queue_id, offset = json.loads(cursor)
        return LetterPlace(str(name), int(queue_id), int(offset))
    except (ValueError, TypeError) as error:
        raise InvalidArgumentError(f"the cursor does not name a page of dead letters: {error}") from None


def _file_rows(letters: Sequence[DeadLetter], *, with_body: bool) -> list[dict[str, Any]]:
    rows = file_rows([letter.message for letter in letters], with_body=with_body)
    return [_of_letter(letter) | row | {"topic": letter.topic} for letter, row in zip(letters, rows, strict=True)]


def _of_letter(letter: DeadLetter) -> dict[str, Any]:
    values = (letter.message.store_timestamp_ms, letter.message.reconsume_times, letter.replayed)
    return dict(zip(LETTER_COLUMNS[: len(values)], values, strict=True))


def _with_body(request: Request) -> bool:
    return bodies_shown(user_of(request), console_of(request).settings)


DEAD_LETTERS_ROUTES: Final = [
    Route("/groups/{group}/dead-letters", show),
    Route("/groups/{group}/dead-letters/export", export),
    Route("/groups/{group}/dead-letters/replay", progress),
    Route("/groups/{group}/dead-letters/replay", start, methods=["POST"]),
    Route("/groups/{group}/dead-letters/stop", stop, methods=["POST"]),
    Route("/api/v1/groups/{group}/dead-letters", as_json),
]
