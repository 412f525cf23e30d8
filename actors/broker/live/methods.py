"""The methods of the Broker actor for live settings: changing them, telling them, and having them take effect.

A change of a remote method about settings belongs here; what may be set is decided in raymq.common.config.live. The
changes are a part of the broker's state, each a record in the state log, so they survive restarts and failovers. The
storage actors of the group are told at once, and again until each of them has answered; each keeps them in a file
(actors.replica.live_settings). Which of them have answered is not kept: a new broker tells all of them.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from actors.broker.master_store import MasterStore
from actors.broker.state_log import DecidedChanges, StateLog
from actors.core.broker.state import BrokerState
from actors.replica.live_settings import changes_for_stores
from raymq.common.config.cluster import BrokerSettings
from raymq.common.config.live import LiveOptions, SettingValue, apply_changes, is_live
from raymq.common.errors import RaymqError
from raymq.common.protocol.settings import BrokerConfig
from raymq.remoting.storage_clients import StorageClients

TELL_TIMEOUT_S: Final = 3.0
"""Bounds the call that tells a storage actor of the changes; one that is away is told again."""
TELL_AGAIN_ROUNDS: Final = 6
"""Every so many rounds of the housekeeping all storage actors are told, whatever they were told before."""

logger = logging.getLogger(__name__)


class SettingsMethods(ABC):
    """One part of the Broker, which inherits it, so that these are methods of the actor. Thread-safe."""

    _log: StateLog

    def __init__(self, settings: BrokerSettings, store: MasterStore, storages: StorageClients) -> None:
        self._started_with = settings
        self._start = LiveOptions(settings.options, settings.store, settings.replication, settings.metrics.options)
        self._replica_names, self._storage_of = store.replicas, storages.get
        self._followed: dict[str, SettingValue] = {}
        """The changes that the broker itself obeys."""
        self._refused: dict[str, str] = {}
        self._told: dict[str, dict[str, SettingValue]] = {}
        """By storage actor, the changes that it has been told."""
        self._rounds = 0
        self._settings_lock = threading.Lock()
        self._tell_lock = threading.Lock()

    @abstractmethod
    def _change(self, decide: Callable[[BrokerState], DecidedChanges]) -> bool:
        """Carry a change of the state out; durable on return."""

    @abstractmethod
    def _take_settings(self, settings: BrokerSettings) -> None:
        """Have the broker itself go on with other settings."""

    def config(self) -> BrokerConfig:
        """The settings of this broker group: as started, as changed, as they count."""
        changed = self._log.ready().settings
        now, refused = apply_changes(self._start, changed)
        started = self._start.plain()
        live = frozenset(name for name in started if is_live(name))
        return BrokerConfig(started, dict(changed), now.plain(), refused, live, self._behind())

    def set_config(self, name: str, value: SettingValue) -> BrokerConfig:
        """Change a live setting of this broker group; durable, and in effect where servers answer, on return.

        `name` in any spelling. Returns the settings as they are then. InvalidArgumentError: an unknown name, or a
        setting that is read only at a start. ConfigError: a value that raymq.yaml could not have either. Safe to
        repeat.
        """
        self._change(lambda state: state.decide_setting(self._start, name, value))
        return self._changed_config()

    def unset_config(self, name: str) -> BrokerConfig:
        """Have a live setting be as raymq.yaml said when this broker was started. As `set_config`."""
        self._change(lambda state: state.decide_setting_unset(name))
        return self._changed_config()

    def _differing(self, changed: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
        """The changes with another value than the one that this broker was started with."""
        return {name: value for name, value in changed.items() if self._start.plain().get(name) != value}

    def _changed_config(self) -> BrokerConfig:
        self._follow_settings()
        self._tell_stores()
        return self.config()

    def _follow_settings(self) -> None:
        """Obey the changes that hold now. Cheap while nothing has changed."""
        changed = self._log.read(lambda state: state.settings)
        if changed is self._followed:
            return
        with self._settings_lock:
            now, self._refused = apply_changes(self._start, changed)
            for name, reason in self._refused.items():
                logger.warning("the live setting %s does not count: %s", name, reason)
            started = self._started_with
            metrics = replace(started.metrics, options=now.metrics)
            self._take_settings(
                replace(started, options=now.broker, store=now.store, replication=now.replication, metrics=metrics)
            )
            self._followed = changed

    def _tell_stores(self, *, again: bool = False) -> None:
        """Tell the storage actors that have not heard of the newest changes, or with `again` all of them. One that is
        away is told by a later call: this one does not fail for it."""
        with self._tell_lock:
            wanted = changes_for_stores(self._log.ready().settings)
            for name in self._replica_names:
                if self._told.get(name) == wanted and not again:
                    continue
                try:
                    self._storage_of(name).control("change_settings", wanted, timeout_s=TELL_TIMEOUT_S)
                except RaymqError as error:
                    logger.info("%s does not hear of its settings now: %s", name, error)
                else:
                    self._told[name] = wanted

    def _keep_settings(self) -> None:
        """Obey, and tell, what has changed; called at intervals, and first when the state is known. A replica that was
        made anew on another node has no file of changes, so that all are told now and then."""
        self._follow_settings()
        self._rounds += 1
        self._tell_stores(again=self._rounds % TELL_AGAIN_ROUNDS == 0)

    def _behind(self) -> tuple[str, ...]:
        wanted = changes_for_stores(self._log.ready().settings)
        return tuple(name for name in self._replica_names if self._told.get(name, {}) != wanted)
