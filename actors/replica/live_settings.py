"""The live settings of one storage actor: the values of raymq.yaml, combined with the changes from its broker.

This module stores and applies live settings; raymq.common.config.live defines which settings are live.

On disk
    config/liveSettings.json    {"store.file_reserved_time_hours": 48, …}: all changes, as last received from the broker

The broker's state log has the authoritative changes. The file lets a store keep its settings if it is opened before its
broker answers, or while another replica is the master. If a store has missed changes, the broker sends them as soon as
the store answers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Final

from raymq.common.config.cluster import ReplicationOptions
from raymq.common.config.live import LIVE_SETTINGS, LiveOptions, apply_changes
from raymq.common.config.metrics import MetricsOptions
from raymq.common.config.store import StoreOptions, StoreSettings
from raymq.common.config.values import SettingValue

LIVE_SETTINGS_FILE: Final = "liveSettings.json"
STORE_SECTIONS: Final = ("store", "replication", "metrics")
"""The sections of raymq.yaml with live settings that apply to storage actors."""

logger = logging.getLogger(__name__)


def changes_for_stores(changes: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
    """Return only the changes of settings that apply to storage actors."""
    return {name: value for name, value in changes.items() if name.partition(".")[0] in STORE_SECTIONS}


class StoreLiveSettings:
    """The current settings of one storage actor. The object `settings` is modified in place, because the parts of the
    store share it."""

    def __init__(
        self,
        settings: StoreSettings,
        replication: ReplicationOptions | None = None,
        metrics: MetricsOptions | None = None,
    ) -> None:
        self._settings = settings
        options = {name: getattr(settings, name) for name in StoreOptions.model_fields}
        self._start = LiveOptions(
            # skip the validation: the settings with which the actor was started were already validated
            store=StoreOptions.model_construct(**options),
            replication=replication or ReplicationOptions(),
            metrics=metrics or MetricsOptions(),
        )
        self.now = self._start
        self._changes: dict[str, SettingValue] = {}

    def read(self, text: str | None) -> None:
        """Apply the changes in `text`, the content of the settings file. `text` is None if the file does not exist.

        If the content is not a JSON object, no change is applied: the broker sends the changes again.
        """
        try:
            changes = {} if text is None else json.loads(text)
        except ValueError:
            changes = None
        if isinstance(changes, dict):
            self.take({str(name): value for name, value in changes.items()})
        else:
            logger.warning("file %s is not a JSON object and is ignored", LIVE_SETTINGS_FILE)

    def take(self, changes: Mapping[str, SettingValue]) -> None:
        """Replace all current changes of settings with `changes`. A change that is no longer valid is left out, with a
        warning."""
        self._changes = changes_for_stores(changes)
        self.now, refused = apply_changes(self._start, self._changes)
        for name, reason in refused.items():
            logger.warning("the changed setting %s is ignored: %s", name, reason)
        self._settings.change(self.now.store, LIVE_SETTINGS["store"])

    def store(self, changes: Mapping[str, SettingValue], write: Callable[[str, str], None]) -> None:
        """Write the changed settings to the file of live settings with the function `write`, then apply them as `take`
        does. Writes nothing if the file already has the same text."""
        wanted = changes_for_stores(changes)
        if wanted != self._changes:
            write(LIVE_SETTINGS_FILE, json.dumps(wanted, indent=1, sort_keys=True))
        self.take(wanted)
