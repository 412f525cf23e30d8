"""The damage that a store has found in files beside its log, for the store's status."""

from __future__ import annotations

import logging
from typing import Final

TEXTS_MAX: Final = 100

logger = logging.getLogger(__name__)


class DamageNotes:
    """Descriptions of damaged files and of what was done about them. Thread-safe: the list only grows."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def texts(self) -> tuple[str, ...]:
        """The first TEXTS_MAX findings, in the order they were noted."""
        return tuple(self._texts)

    def note(self, text: str) -> None:
        """Note and log a finding."""
        logger.error("%s", text)
        if len(self._texts) < TEXTS_MAX:
            self._texts.append(text)
