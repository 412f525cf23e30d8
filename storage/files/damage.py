"""Collects the damage that a store has found in files beside its log, for the store's status report."""

from __future__ import annotations

import logging
from typing import Final

TEXTS_MAX: Final = 100

logger = logging.getLogger(__name__)


class DamageNotes:
    """Descriptions of damaged files and of their repair. Descriptions are only added, never removed.
    Thread-safe."""

    def __init__(self, *, logs: bool = True) -> None:
        """`logs`: False if the descriptions are not logged."""
        self._texts: list[str] = []
        self._logs = logs

    @property
    def texts(self) -> tuple[str, ...]:
        """The first TEXTS_MAX descriptions of damaged files, in the order in which they were added."""
        return tuple(self._texts)

    def note(self, text: str) -> None:
        """Add the description `text` of a damaged file to `texts`, unless that list is full. Also log the description
        as an error."""
        if self._logs:
            logger.error("%s", text)
        if len(self._texts) < TEXTS_MAX:
            self._texts.append(text)
