"""The methods of the Broker actor for live settings: they change, distribute and apply the settings.

raymq.common.config.live defines which settings can be changed. The changes are part of the broker's state. Each change
is a record in the state log, and so survives restarts and failovers. The broker sends changes to the storage actors of
the group at once, and repeats this until each of them has answered. Each storage actor stores the changes in a file
(actors.replica.live_settings). The broker does not store which actors have answered: a new broker sends the changes to
all of them.
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
from raymq.common.config.live import LiveOptions, apply_changes, is_live
from raymq.common.config.values import SettingValue
from raymq.common.errors import RaymqError
from raymq.common.protocol.settings import BrokerConfig
from raymq.remoting.storage_clients import StorageClients

TELL_TIMEOUT_S: Final = 3.0
"""Timeout, in seconds, of a call that sends changed settings to a storage actor. An unreachable actor gets the changed
settings later."""
TELL_AGAIN_ROUNDS: Final = 6
"""After this number of housekeeping rounds the broker sends the changed settings again to all storage actors, even if
they have received them before."""

logger = logging.getLogger(__name__)


class SettingsMethods(ABC):
    """The Broker's methods for live settings; the Broker actor inherits from this class. Thread-safe."""

    _log: StateLog

    def __init__(self, settings: BrokerSettings, store: MasterStore, storages: StorageClients) -> None:
        self._started_with = settings
        self._start = LiveOptions(settings.options, settings.store, settings.replication, settings.metrics.options)
        self._master_store, self._storage_of = store, storages.get
        self._followed: dict[str, SettingValue] = {}
        """The changes of live settings that the broker has applied to itself."""
        self._refused: dict[str, str] = {}
        self._told: dict[str, dict[str, SettingValue]] = {}
        """The changes of live settings that each storage actor has received, by the actor's name."""
        self._rounds = 0
        self._settings_lock = threading.Lock()
        self._tell_lock = threading.Lock()

    @abstractmethod
    def _change(self, decide: Callable[[BrokerState], DecidedChanges]) -> bool:
        """Apply a change to the broker's state; durable on return."""

    @abstractmethod
    def look_for_master(self) -> None:
        """Ask the Controller for the group's master and replicas. Raises RaymqError if it does not answer."""

    @abstractmethod
    def _take_settings(self, settings: BrokerSettings) -> None:
        """Put new settings of the section `broker` into effect in the Broker actor itself."""

    def config(self) -> BrokerConfig:
        """Return the settings of this broker group: the values at the start, the changes, and the values in effect.

        The values that `raymq broker replicas` has changed come from the Controller. If the Controller does not answer,
        they are the values that this broker got last.
        """
        try:
            self.look_for_master()
        except RaymqError as error:
            logger.info("the Controller does not answer, so the settings of the replicas may be old: %s", error)
        changed = self._log.ready().settings
        now, refused = apply_changes(self._start, changed)
        started = self._start.plain()
        live = frozenset(name for name in started if is_live(name))
        ordered = self._ordered()
        return BrokerConfig(started, dict(changed), {**now.plain(), **ordered}, refused, live, self._behind(), ordered)

    def set_config(self, name: str, value: SettingValue) -> BrokerConfig:
        """Change a live setting of this broker group. On return the change is durable, and in effect on all reachable
        servers.

        `name` may use any spelling of the setting. Returns the resulting settings. Raises InvalidArgumentError if the
        name is unknown, or if the setting is read only at a start. Raises ConfigError if the value would be invalid in
        raymq.yaml, too. Safe to repeat.
        """
        self._change(lambda state: state.decide_setting(self._start, name, value))
        return self._changed_config()

    def unset_config(self, name: str) -> BrokerConfig:
        """Reset a live setting to the value that raymq.yaml had when this broker was started. Returns and raises the
        same as `set_config`."""
        self._change(lambda state: state.decide_setting_unset(name))
        return self._changed_config()

    def _ordered(self) -> dict[str, SettingValue]:
        """Return the settings of the replicas that commands have changed, as this broker got them last."""
        return {f"replication.{name}": value for name, value in self._master_store.ordered.items()}

    def _differing(self, changed: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
        """Return the entries of `changed` whose values differ from the settings with which this broker was
        started."""
        return {name: value for name, value in changed.items() if self._start.plain().get(name) != value}

    def _changed_config(self) -> BrokerConfig:
        self._follow_settings()
        self._tell_stores()
        return self.config()

    def _follow_settings(self) -> None:
        """Apply the stored changes of settings to this broker. Cheap if nothing has changed."""
        changed = self._log.read(lambda state: state.settings)
        if changed is self._followed:
            return
        with self._settings_lock:
            now, self._refused = apply_changes(self._start, changed)
            for name, reason in self._refused.items():
                logger.warning("the changed setting %s is ignored: %s", name, reason)
            started = self._started_with
            metrics = replace(started.metrics, options=now.metrics)
            self._take_settings(
                replace(started, options=now.broker, store=now.store, replication=now.replication, metrics=metrics)
            )
            self._followed = changed

    def _tell_stores(self, *, again: bool = False) -> None:
        """Send the newest changes of settings to the storage actors that have not received them, or with `again` to all
        storage actors.

        Raises no error if an actor is unreachable; a later call sends the changes to that actor.
        """
        with self._tell_lock:
            wanted = changes_for_stores(self._log.ready().settings)
            for name in self._master_store.replicas:
                if self._told.get(name) == wanted and not again:
                    continue
                try:
                    self._storage_of(name).control("change_settings", wanted, timeout_s=TELL_TIMEOUT_S)
                except RaymqError as error:
                    logger.info("cannot send changed settings to %s, retrying later: %s", name, error)
                else:
                    self._told[name] = wanted

    def _keep_settings(self) -> None:
        """Apply changes of settings to this broker, and send them to the storage actors. Called at intervals, and once
        as soon as the broker's state is loaded.

        Each storage actor stores the changes in a file. A replica that was recreated on another node lacks this file,
        so all storage actors get all changes again from time to time.
        """
        self._follow_settings()
        self._rounds += 1
        self._tell_stores(again=self._rounds % TELL_AGAIN_ROUNDS == 0)

    def _behind(self) -> tuple[str, ...]:
        wanted = changes_for_stores(self._log.ready().settings)
        return tuple(name for name in self._master_store.replicas if self._told.get(name, {}) != wanted)
