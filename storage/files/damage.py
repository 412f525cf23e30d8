"""The damage that a store has found in files beside its log, for its status."""

from __future__ import annotations

import logging
from typing import Final

TEXTS_MAX: Final = 100

logger = logging.getLogger(__name__)


class DamageNotes:
    """Findings in words: which file was damaged, and what was done about it. Thread-safe: the list only grows."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    @property
    def texts(self) -> tuple[str, ...]:
        """The first TEXTS_MAX findings, in their order."""
        return tuple(self._texts)

    def note(self, text: str) -> None:
        """Note and log a finding."""
        logger.error("%s", text)
        if len(self._texts) < TEXTS_MAX:
            self._texts.append(text)
