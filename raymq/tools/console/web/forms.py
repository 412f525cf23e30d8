"""Forms: fields as values, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from starlette.requests import Request

from raymq.common.errors import InvalidArgumentError
from raymq.common.message import MAX_MESSAGE_SIZE_BYTES
from raymq.common.numbers import NOT_NEGATIVE, NumberRange, number_of_text

FORM_FIELDS_MAX: Final = 1_000
FORM_BODY_MAX_BYTES: Final = MAX_MESSAGE_SIZE_BYTES + 64 * 1024
"""The largest field of a form: a message's body."""


class Form:
    """The fields of a form, or of an address. Errors are InvalidArgumentError."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def text(self, name: str, default: str = "") -> str:
        """A field without white space around it."""
        return self._fields.get(name, default).strip() or default

    def raw(self, name: str) -> str:
        """A field as it was sent."""
        return self._fields.get(name, "")

    def needed(self, name: str, label: str) -> str:
        """A field that must not be empty."""
        text = self.text(name)
        if not text:
            raise InvalidArgumentError(f"{label} is missing")
        return text

    def number(self, name: str, label: str, bounds: NumberRange = NOT_NEGATIVE) -> int | None:
        """A whole number, None if the field is empty. InvalidArgumentError."""
        text = self.text(name)
        return number_of_text(label, text, bounds) if text else None

    def time_ms(self, name: str, label: str) -> int | None:
        """A time (ms since 1970), None if the field is empty: ISO 8601, UTC unless it names a zone."""
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
    """The fields that a page has sent; of several with one name the last one. HTTPException with status 400 for more
    of them, or a longer one."""
    async with request.form(max_files=0, max_fields=fields_max, max_part_size=field_max_bytes) as fields:
        return Form({name: value for name, value in fields.multi_items() if isinstance(value, str)})


def query_of(request: Request) -> Form:
    """The fields in a page's address."""
    return Form(dict(request.query_params))
