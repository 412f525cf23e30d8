"""The search form of a topic's messages: its fields, the arguments of the search, and the permission to search in
bodies.

Times are UTC unless they have a time zone or are relative to now, such as -2h. If the form has an error, it can be
shown again with the values that the user entered. An admin always sees bodies; a viewer sees bodies only if the setting
`show_bodies` is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

from raymq.common.delay import parse_time
from raymq.common.errors import InvalidArgumentError, NoPermissionError
from raymq.common.numbers import number_of_text
from raymq.common.places import parse_queue
from raymq.tools.console.security.sessions import ConsoleUser
from raymq.tools.console.settings import ConsoleSettings


def bodies_shown(user: ConsoleUser, settings: ConsoleSettings) -> bool:
    """Return True if this user may see message bodies."""
    return user.is_admin or settings.show_bodies


def check_text_search(contains: str, *, with_body: bool) -> None:
    """Raise NoPermissionError if a user who may not see bodies searches for a text in bodies. The search results would
    reveal the bodies' content."""
    if contains and not with_body:
        raise NoPermissionError(
            "viewers cannot search in bodies, because bodies are hidden from viewers (console.show_bodies)"
        )


SEARCH_STARTS: Final = {
    "latest": "newest",
    "earliest": "oldest",
    "offset": "from an offset",
    "time": "in a time range",
}
"""The possible values of `start` (the position at which a search begins), with their labels."""
SEARCH_LIMITS: Final = ("50", "100", "200")


@dataclass(frozen=True, slots=True)
class SearchForm:
    """The fields of the search form with the values that the user entered. `start`: one of SEARCH_STARTS. `queue`:
    BROKER:QUEUE, or empty. `text`: a text to find in bodies."""

    start: str = "latest"
    queue: str = ""
    offset: str = ""
    begin: str = ""
    end: str = ""
    tags: str = ""
    text: str = ""
    limit: str = SEARCH_LIMITS[0]
    cursor: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str]) -> SearchForm:
        """Build the search form from the query parameters of a URL. Unknown parameters are ignored."""
        return cls(**{name: parameters[name].strip() for name in cls.__slots__ if name in parameters})

    def arguments(self, topic: str, now_ms: int) -> dict[str, Any]:
        """Convert the search form's fields to arguments of `Admin.browse`. The topic is not included. Raises
        InvalidArgumentError if a field has an invalid value."""
        if self.start not in SEARCH_STARTS:
            raise InvalidArgumentError(f"{self.start!r} is not a start of a search; choose {', '.join(SEARCH_STARTS)}")
        if self.limit not in SEARCH_LIMITS:
            raise InvalidArgumentError(
                f"a search cannot show {self.limit!r} messages; choose {', '.join(SEARCH_LIMITS)}"
            )
        queue = parse_queue(topic, self.queue) if self.queue else None
        arguments: dict[str, Any] = {
            "queue": queue,
            "newest_first": self.start == "latest",
            "tags": self.tags or "*",
            "contains": self.text,
            "limit": int(self.limit),
            "cursor": self.cursor or None,
        }
        if self.start == "offset":
            if queue is None:
                raise InvalidArgumentError("offsets count in each queue: choose a queue, too")
            return arguments | {"begin_offset": number_of_text("the offset", self.offset)}
        if self.start == "time":
            begin_ms, end_ms = (parse_time(text, now_ms) if text else None for text in (self.begin, self.end))
            if begin_ms is not None and end_ms is not None and begin_ms >= end_ms:
                raise InvalidArgumentError("the time range is empty: its end must be after its beginning")
            return arguments | {"begin_ms": begin_ms or 0, "end_ms": end_ms}
        return arguments | {"begin_ms": 0} if self.start == "earliest" else arguments

    def address(self, **changes: str) -> str:
        """Return the search form as the query string of a URL. `changes` replaces fields. Fields that have their
        default values are left out."""
        first, fields = asdict(SearchForm()), asdict(replace(self, **changes))
        return urlencode({name: text for name, text in fields.items() if text != first[name]})
