"""Settings that may change while raymq runs: their names, values and checks. This module does no I/O.

A broker stores the setting changes of its broker group in its state log, and applies them over the values from
raymq.yaml. A change is a name such as ``store.file_reserved_time_hours`` with a YAML value. The models that check
raymq.yaml also check each change.

A setting has three spellings: the full name; the key alone, if only one section has the key; and RocketMQ's name, such
as ``fileReservedTime``. The spellings also cover settings that are read only when raymq starts, so that an error can
name such a setting.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from raymq.common.config.cluster import (
    SETTINGS_SECTIONS,
    BrokerOptions,
    ClusterSettings,
    ReplicationOptions,
    explain,
)
from raymq.common.config.metrics import MetricsOptions
from raymq.common.config.settings_file import read_setting
from raymq.common.config.store import StoreOptions
from raymq.common.config.values import SettingValue
from raymq.common.errors import ConfigError, InvalidArgumentError, not_found

LIVE_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "broker": (
        "broker_permission",
        "auto_create_topic_enable",
        "default_topic_queue_nums",
        "auto_create_subscription_group",
        "register_name_server_period_ms",
        "disable_consume_if_consumer_read_slowly",
        "consumer_fallbehind_threshold_bytes",
        "transaction_check_interval_ms",
        "offset_sweep_interval_ms",
        "heartbeat_queue_capacity",
        "wait_time_in_heartbeat_queue_ms",
        "client_manager_queue_capacity",
        "wait_time_in_client_manager_queue_ms",
    ),
    "store": (
        "flush_interval_commit_log_ms",
        "flush_commit_log_least_pages",
        "flush_commit_log_thorough_interval_ms",
        "commit_interval_commit_log_ms",
        "commit_commit_log_thorough_interval_ms",
        "flush_interval_consume_queue_ms",
        "flush_consume_queue_least_pages",
        "flush_consume_queue_thorough_interval_ms",
        "sync_flush_timeout_ms",
        "max_msgs_num_batch",
        "query_wait_index_ms",
        "file_reserved_time_hours",
        "delete_when",
        "clean_resource_interval_ms",
        "compaction_schedule_interval_ms",
        "delete_file_batch_max",
        "disk_max_used_space_ratio",
        "disk_space_warning_level_ratio",
        "clean_file_forcibly_enable",
        "os_page_cache_busy_timeout_ms",
        "send_queue_capacity",
        "wait_time_in_send_queue_ms",
        "pull_queue_capacity",
        "wait_time_in_pull_queue_ms",
        "admin_broker_queue_capacity",
        "wait_time_in_admin_broker_queue_ms",
        "fetch_waiters_max",
        "transaction_time_out_ms",
        "transaction_check_max",
        "transaction_op_msg_max_size",
        "transaction_open_max",
        "reject_transaction_message",
        "max_lmq_consume_queue_num",
        "scrub_period_hours",
        "scrub_rate_max_bytes",
        "access_message_in_memory_max_ratio",
    ),
    "replication": ("slave_timeout_ms",),
    "metrics": ("per_topic_max", "per_group_max"),
}
"""The settings that may change while raymq runs, by section. An actor reads all other settings only when it
starts."""

_ROCKETMQ_NAMES: Final = {
    "osPageCacheBusyTimeOutMills": "store.os_page_cache_busy_timeout_ms",
    "waitTimeMillsInSendQueue": "store.wait_time_in_send_queue_ms",
    "sendThreadPoolQueueCapacity": "store.send_queue_capacity",
    "waitTimeMillsInPullQueue": "store.wait_time_in_pull_queue_ms",
    "pullThreadPoolQueueCapacity": "store.pull_queue_capacity",
    "waitTimeMillsInAdminBrokerQueue": "store.wait_time_in_admin_broker_queue_ms",
    "adminBrokerThreadPoolQueueCapacity": "store.admin_broker_queue_capacity",
    "waitTimeMillsInHeartbeatQueue": "broker.wait_time_in_heartbeat_queue_ms",
    "heartbeatThreadPoolQueueCapacity": "broker.heartbeat_queue_capacity",
    "clientManagerThreadPoolQueueCapacity": "broker.client_manager_queue_capacity",
}
"""Full raymq names of settings whose RocketMQ names do not follow the rule of `rocketmq_name`, by RocketMQ
name."""

_OF_REPLICAS: Final = ("replication.replicas", "replication.min_in_sync_replicas")
"""Settings that only `raymq broker replicas` changes while raymq runs."""

_UNITS: Final = ("_ms", "_bytes", "_hours")


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """The current values of a broker group's settings, by section. Contains only the sections that have live settings:
    settings that can change while the broker group runs."""

    broker: BrokerOptions = field(default_factory=BrokerOptions)
    store: StoreOptions = field(default_factory=StoreOptions)
    replication: ReplicationOptions = field(default_factory=ReplicationOptions)
    metrics: MetricsOptions = field(default_factory=MetricsOptions)

    def value(self, key: str) -> Any:
        """Return the value of the setting with the full name `key`, in the type of the settings model."""
        section, _, name = key.partition(".")
        return getattr(getattr(self, section), name)

    def plain(self) -> dict[str, Any]:
        """Return the values of all settings by full name, as plain YAML and JSON values."""
        return {
            f"{section}.{name}": _plain(getattr(getattr(self, section), name))
            for section in LIVE_SETTINGS
            for name in SETTINGS_SECTIONS[section].model_fields
        }


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def rocketmq_name(name: str) -> str:
    """Return RocketMQ's spelling of a key, in camel case without its unit: ``fileReservedTime`` for
    ``file_reserved_time_hours``."""
    for unit in _UNITS:
        name = name.removesuffix(unit)
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def full_name(name: str) -> str:
    """Return the full name of a setting, such as ``store.delete_when``, for any of its spellings.

    Raises InvalidArgumentError if the name is unknown (the error suggests the most similar name), or if several
    sections have the key.
    """
    found = _SPELLINGS.get(name, ())
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgumentError(f"setting {name!r} is in several sections: write {' or '.join(found)}")
    close = difflib.get_close_matches(name[:200], list(_SPELLINGS), n=1)
    advice = "see `raymq config show --effective` for the settings of broker groups, and docs/settings.md for all"
    raise InvalidArgumentError(not_found(f"setting {name[:200]!r} does not exist", close, advice))


def live_name(name: str) -> str:
    """Return the full name of a live setting, given in any spelling. Raises InvalidArgumentError if the name is unknown
    or fits several settings, or if the setting is read only when raymq starts."""
    full = full_name(name)
    section, _, key = full.rpartition(".")
    if full in _OF_REPLICAS:
        raise InvalidArgumentError(
            f"setting {full!r} changes by `raymq broker replicas NAME`. Of a group that was never changed so, it also "
            "changes in raymq.yaml, with `raymq down` and `raymq up`"
        )
    if key not in LIVE_SETTINGS.get(section, ()):
        raise InvalidArgumentError(
            f"setting {full!r} is read only when raymq starts: change it in raymq.yaml, then `raymq down` and "
            "`raymq up`"
        )
    return full


def is_live(full: str) -> bool:
    """True if the setting with this full name may change while raymq runs."""
    section, _, key = full.rpartition(".")
    return key in LIVE_SETTINGS.get(section, ())


def parse_value(name: str, text: str) -> SettingValue:
    """Parse the text `text` that a user typed as the value of the setting `name`. `check_change` checks the result. The
    text is YAML, as in raymq.yaml; for a setting whose value is a text, the typed text is the value.

    Raises InvalidArgumentError if the name is unknown, or if the value is a list or a mapping. Raises ConfigError if
    the text is not valid YAML.
    """
    full = full_name(name)
    section, _, key = full.rpartition(".")
    model = SETTINGS_SECTIONS[section] if section else ClusterSettings
    if model.model_fields[key].annotation is str:
        return text
    value = read_setting(full, text)
    if value is not None and not isinstance(value, (str, int, float, bool)):
        raise InvalidArgumentError(f"setting {full!r} must be a single value, not {text[:200]!r}")
    return value


def check_change(
    start: LiveOptions, changes: Mapping[str, SettingValue], name: str, value: SettingValue
) -> tuple[str, SettingValue]:
    """Check one more change of a live setting, with the checks of raymq.yaml.

    `start`: the settings with which raymq started. `changes`: the changes so far; invalid changes are ignored. Returns
    the setting's full name and the checked value. If the setting is a number, a text that spells a number is converted.
    Raises InvalidArgumentError if the name is unknown or the setting is not live. Raises ConfigError if the value is
    not allowed.
    """
    full = live_name(name)
    valid, _ = apply_changes(start, {key: known for key, known in changes.items() if key != full})
    return full, _plain(_with(valid, full, value).value(full))


def apply_changes(start: LiveOptions, changes: Mapping[str, SettingValue]) -> tuple[LiveOptions, dict[str, str]]:
    """Apply `changes` to the settings `start`. Returns the resulting settings, and the invalid changes with the
    reasons.

    A stored change becomes invalid if a later raymq.yaml forbids its value, or if this version of raymq has no such
    live setting.
    """
    now, refused = start, {}
    for name, value in sorted(changes.items()):
        try:
            now = _with(now, live_name(name), value)
        except (ConfigError, InvalidArgumentError) as error:
            refused[name] = str(error)
    return now, refused


def _with(options: LiveOptions, full: str, value: SettingValue) -> LiveOptions:
    section, _, key = full.partition(".")
    before: BaseModel = getattr(options, section)
    try:
        changed = type(before).model_validate({**before.model_dump(), key: value})
    except ValidationError as error:
        raise ConfigError(explain("the setting", error, section)) from None
    sections = {name: getattr(options, name) for name in LIVE_SETTINGS}
    return LiveOptions(**{**sections, section: changed})


def _spellings() -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    models: dict[str, type[BaseModel]] = {"": ClusterSettings, **SETTINGS_SECTIONS}
    for section, model in models.items():
        for key in model.model_fields:
            if not section and key in SETTINGS_SECTIONS:
                continue
            full = f"{section}.{key}" if section else key
            for spelling in dict.fromkeys((full, key, rocketmq_name(key))):
                found.setdefault(spelling, []).append(full)
    found |= {name: [full] for name, full in _ROCKETMQ_NAMES.items()}
    return {spelling: tuple(names) for spelling, names in found.items()}


_SPELLINGS: Final = _spellings()
"""Each spelling of a setting, with the full names that the spelling may mean."""
