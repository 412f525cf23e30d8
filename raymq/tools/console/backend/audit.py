"""Values about changes that somebody made in the console."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One change, tried: when (ms since 1970), who in which role from which address, what, and how it ended.

    `outcome` is "done", or the error in words. `arguments` never hold bodies or tokens.
    """

    at_ms: int
    who: str
    role: str
    address: str
    action: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    outcome: str = "done"


@dataclass(frozen=True, slots=True)
class AuditPage:
    """Entries, newest first. `cursor` goes on with older ones, None at the end."""

    entries: tuple[AuditEntry, ...]
    cursor: str | None = None
