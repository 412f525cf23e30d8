"""The settings of a whole raymq cluster. Unknown keys and values out of bounds are refused when the settings are read.

Names are RocketMQ's in snake_case, with the unit at the end. Defaults are RocketMQ's unless design.md says otherwise
(spec/storage.md §6). A component such as a broker or a store gets only its own section of the settings.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from string import ascii_lowercase
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from raymq.common.config.access import AccessOptions
from raymq.common.config.console import ConsoleOptions
from raymq.common.config.gateway import GatewayOptions
from raymq.common.config.metrics import MetricsOptions, MetricsSettings
from raymq.common.config.section import SettingsSection
from raymq.common.config.settings_file import read_settings_file
from raymq.common.config.store import StoreOptions, absolute_path
from raymq.common.errors import ConfigError
from raymq.common.names import BROKER_GROUPS_MAX, REBALANCE_SLOTS, REPLICAS_OF_GROUP_MAX, NameServerName
from raymq.common.numbers import NUMBER_MAX, shown

DEFAULT_FILE: Final = "raymq.yaml"

DATA_DIR_VARIABLE: Final = "RAYMQ_DATA_DIR"
"""Environment variable of a node's Ray processes. The variable names the directory of the stores on this node and
overrides `data_dir`."""


class BrokerOptions(SettingsSection):
    """The section `broker` of raymq.yaml: topics and groups that brokers create, the registration interval, and the
    handling of groups with a large lag."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    auto_create_topic_enable: bool = False
    """`true`: a send to a topic that does not exist creates the topic, even if its name is mistyped."""
    default_topic_queue_nums: Annotated[int, Field(ge=1, le=1024)] = 8
    """Maximum number of queues per broker group for a topic that a send creates automatically."""
    auto_create_subscription_group: bool = True
    """`true`: the first consumer of a group creates the group."""
    register_name_server_period_ms: Annotated[int, Field(ge=1, le=86_400_000)] = 30_000
    """Interval at which brokers register again at the NameServers. Values are clamped to 10 s to 1 min."""
    disable_consume_if_consumer_read_slowly: bool = False
    """`true`: a group whose lag is too large may no longer consume (the broker sets the group's `consume_enable` to
    false)."""
    consumer_fallbehind_threshold_bytes: Annotated[int, Field(ge=1, le=NUMBER_MAX)] = 16 << 30
    """The largest lag, in bytes of the log, that `disable_consume_if_consumer_read_slowly` allows."""

    broker_permission: Literal[2, 4, 6] = 6
    """Permissions of the broker group: 4 (read) plus 2 (write). Routes contain the permissions, so producers send to
    other broker groups if the 2 is missing."""
    transaction_check_interval_ms: Annotated[int, Field(ge=100, le=86_400_000)] = 30_000
    """Interval at which brokers ask producers for the outcome of open half messages."""
    offset_sweep_interval_ms: Annotated[int, Field(ge=100, le=86_400_000)] = 60_000
    """Interval in ms at which a broker deletes unused offsets. A group's offsets in a topic are unused if no consumer
    of the group subscribes to the topic any more."""

    heartbeat_queue_capacity: Annotated[int, Field(ge=1, le=10_000_000)] = 50_000
    """Maximum number of client heartbeats that wait for a thread at a broker. Further heartbeats get
    `SystemBusyError`."""
    wait_time_in_heartbeat_queue_ms: Annotated[int, Field(ge=1, le=600_000)] = 31_000
    """How long a heartbeat waits for a thread before the broker refuses it as busy."""
    client_manager_queue_capacity: Annotated[int, Field(ge=1, le=10_000_000)] = 1_000_000
    """Maximum number of client calls that wait for a thread at a broker. Counts calls about groups, offsets, topics and
    transactions, but no heartbeats, which have their own limit."""
    wait_time_in_client_manager_queue_ms: Annotated[int, Field(ge=1, le=600_000)] = 5000
    """Time in ms for which a client call may wait for a thread at a broker. After that time the broker refuses the call
    as busy. Applies to the calls that `client_manager_queue_capacity` limits."""

    @property
    def registration_interval_s(self) -> float:
        """The time in seconds between two full registrations of a broker, within RocketMQ's bounds (golden fact 32 of
        spec/messaging.md)."""
        return min(max(self.register_name_server_period_ms, 10_000), 60_000) / 1000


class BrokerRole(Enum):
    """The fixed role of replica 0, which always leads its broker group. The other replicas are slaves.

    ASYNC_MASTER acknowledges a message after the master's own disk has the message. SYNC_MASTER acknowledges a message
    after `in_sync_replicas` replicas have it.
    """

    ASYNC_MASTER = "ASYNC_MASTER"
    SYNC_MASTER = "SYNC_MASTER"


class ReplicationOptions(SettingsSection):
    """The section `replication` of raymq.yaml: the number of copies, and when a message counts as copied
    (spec/storage.md §11)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replicas: Annotated[int, Field(ge=1, le=REPLICAS_OF_GROUP_MAX)] = 1
    """Number of copies of each broker group's messages, each on a separate node."""
    enable_controller_mode: bool = False
    """`true`: a broker group with one replica also has a Controller, so that `raymq broker replicas` can add replicas
    without a restart. Groups with several replicas always have a Controller."""
    in_sync_replicas: Annotated[int, Field(ge=1, le=REPLICAS_OF_GROUP_MAX)] = 1
    """Number of copies, including the master's, that a message needs before the message is acknowledged."""
    min_in_sync_replicas: Annotated[int, Field(ge=1, le=REPLICAS_OF_GROUP_MAX)] = 1
    """Minimum number of replicas that are in sync. With fewer, the master refuses messages."""
    all_ack_in_sync_state_set: bool = True
    """`true`: a message is acknowledged only after every in-sync replica has it. Used only if `broker_role` is
    not set."""
    slave_timeout_ms: Annotated[int, Field(ge=1, le=600_000)] = 3000
    """How long an append waits for its copies on other replicas. After this time the append's status is
    `FLUSH_SLAVE_TIMEOUT`."""
    ha_max_time_slave_not_catchup_ms: Annotated[int, Field(ge=100, le=3_600_000)] = 15_000
    """Time in ms for which a replica may lag behind its master and still count as in sync."""
    enable_elect_unclean_master: bool = False
    """`true`: a replica that lacks acknowledged messages may lead if no replica with all acknowledged messages
    is left."""
    broker_role: BrokerRole | None = None
    """`ASYNC_MASTER` or `SYNC_MASTER`: replica 0 always has this role, and the other replicas are slaves that never
    lead. `null`: the replicas elect a master."""
    ha_max_gap_not_in_sync_bytes: Annotated[int, Field(ge=1, le=NUMBER_MAX)] = 256 << 20
    """With `broker_role`, a slave counts as in sync only while its log lags the master's log by fewer bytes
    than this."""
    slave_read_enable: bool = False
    """`true`: consumers read old messages from slaves. While no master exists, consumers read all messages from
    slaves."""
    learners: Annotated[int, Field(ge=0, le=8)] = 0
    """Number of replicas that only copy the log. These replicas never lead and never count as in sync."""
    spread: bool = True
    """`true`: the replicas of a broker group must be on different nodes and in different zones. `false` is for trials
    on one machine."""

    replace_after_s: Annotated[float, Field(ge=1, le=30 * 86_400)] = 300.0
    """Seconds after which the replicas of an unreachable node move to another node."""

    @property
    def has_controller(self) -> bool:
        """True if the Controller elects the master of each broker group. False if each group has a single replica,
        which always leads."""
        return self.replicas > 1 or self.enable_controller_mode

    @property
    def learner_numbers(self) -> frozenset[int]:
        """The replicas that only copy the log. They have the highest numbers of the configured replicas."""
        return frozenset(range(self.replicas - self.learners, self.replicas))

    @model_validator(mode="after")
    def _counts_fit(self) -> ReplicationOptions:
        able = self.replicas - self.learners
        for name in ("in_sync_replicas", "min_in_sync_replicas"):
            if getattr(self, name) > able:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but only {able} of {self.replicas} replicas can be in sync"
                )
        if able < 1:
            raise ValueError(f"all {self.replicas} replicas are learners, so none of them can lead")
        return self

    @model_validator(mode="after")
    def _role_fits(self) -> ReplicationOptions:
        if self.broker_role is not None and self.enable_elect_unclean_master:
            raise ValueError(
                "enable_elect_unclean_master cannot be set with broker_role, because broker_role fixes the "
                "master and no master is elected"
            )
        waits = [name for name in ("in_sync_replicas", "min_in_sync_replicas") if getattr(self, name) > 1]
        if self.broker_role is BrokerRole.ASYNC_MASTER and waits:
            raise ValueError(
                f"an ASYNC_MASTER does not wait for replicas: leave out {' and '.join(waits)}, or use SYNC_MASTER"
            )
        return self


class PlacementOptions(SettingsSection):
    """The section `placement` of raymq.yaml: which nodes of the Ray cluster may hold stores."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    node_label: Annotated[
        str | None, Field(pattern=r"^([a-z0-9.-]{1,253}/)?[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$")
    ] = None
    """Label of the Ray nodes that may run replicas; the label's value does not matter (`ray start --labels
    raymq-store=0`). `--wait-nodes` counts only nodes with this label, and `raymq up` searches only these nodes for
    stores."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The settings with which a Broker actor starts."""

    cluster: str
    broker_name: str
    nameservers: tuple[NameServerName, ...]
    options: BrokerOptions = field(default_factory=BrokerOptions)
    replicas: tuple[int, ...] = (0,)
    """The replicas of the broker group at the start. The Controller names the present replicas."""
    slave_read_enable: bool = False
    rebalance_servers: int = 1
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    store: StoreOptions = field(default_factory=StoreOptions)
    """The initial settings of the broker group's stores. The broker sends later changes to the stores."""
    replication: ReplicationOptions = field(default_factory=ReplicationOptions)


class ClusterSettings(SettingsSection):
    """All settings of a raymq cluster, as in `raymq.yaml`. Every key is optional; the defaults run on one machine.

    Broker groups are named broker-a, broker-b and so on. If `broker_groups` is not set, `raymq up` also starts the
    broker groups whose stores exist in the data directories (placement.plan.with_found_stores). Each replica has a
    directory below `data_dir`, named after its broker group and replica number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    cluster_name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] = "raymq"
    """The name of this raymq cluster."""
    data_dir: Path = Path("~/.raymq/store")
    """The directory of the stores, on each node. If a node's Ray processes have the environment variable
    `RAYMQ_DATA_DIR`, the variable takes precedence on that node."""
    name_servers: Annotated[int, Field(ge=1, le=3)] = 1
    """Number of NameServer actors."""
    rebalance_servers: Annotated[int, Field(ge=1, le=REBALANCE_SLOTS)] = 2
    """Number of Rebalance actors. Each actor serves a share of the consumer groups."""
    broker_groups: Annotated[int, Field(ge=1, le=BROKER_GROUPS_MAX)] = 1
    """Number of broker groups. The queues of a topic are divided among the broker groups. If this key is not set,
    `raymq up` also starts all broker groups whose stores exist in the data directories."""
    leave_out: Annotated[tuple[str, ...], Field(max_length=260)] = ()
    """Broker groups (`broker-b`) and replicas (`broker-a-2`) that must not start, although their stores are on
    disk."""
    broker: BrokerOptions = BrokerOptions()
    """The section `broker`, the same for all brokers."""
    store: StoreOptions = StoreOptions()
    """The section `store`, the same for all stores."""
    replication: ReplicationOptions = ReplicationOptions()
    """The section `replication`: the copies of the stores on other nodes."""
    placement: PlacementOptions = PlacementOptions()
    """The section `placement`: the nodes that may hold stores."""
    metrics: MetricsOptions = MetricsOptions()
    """The section `metrics`: reports in Ray's Prometheus pipeline."""
    console: ConsoleOptions = ConsoleOptions()
    """The section `console`: the web console."""
    gateway: GatewayOptions = GatewayOptions()
    """The section `gateway`: the server for clients of RocketMQ 5."""
    access: AccessOptions = AccessOptions()
    """The section `access`: users and their policies."""

    @field_validator("data_dir")
    @classmethod
    def _expanded(cls, path: Path) -> Path:
        return absolute_path(path)

    @field_validator("leave_out")
    @classmethod
    def _names_fit(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"broker-[a-z](-[0-9]+)?", name):
                raise ValueError(
                    f"{name!r} is neither the name of a broker group (such as broker-b) nor the name of a replica "
                    "(such as broker-a-2)"
                )
        return names

    @property
    def broker_names(self) -> list[str]:
        """The names of the configured broker groups: broker-a, broker-b and so on."""
        return [f"broker-{letter}" for letter in ascii_lowercase[: self.broker_groups]]


SETTINGS_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    name: info.annotation
    for name, info in ClusterSettings.model_fields.items()
    if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
}
"""The classes of the sections of `raymq.yaml`, by section name."""


def data_dir_here(data_dir: Path) -> Path:
    """Return the directory of the stores on this process's node: the value of RAYMQ_DATA_DIR if the variable is set,
    else `data_dir`."""
    return Path(os.environ.get(DATA_DIR_VARIABLE) or data_dir).expanduser().absolute()


def path_here(path: Path, data_dir: Path) -> Path:
    """Translate `path`, which is below `data_dir`, into the path on this process's node (`data_dir_here`)."""
    return data_dir_here(data_dir) / path.relative_to(data_dir)


def load_settings(path: Path | str | None, **overrides: Any) -> ClusterSettings:
    """Read the settings of a cluster from `raymq.yaml`. Keyword arguments that are not None take precedence over the
    file.

    If `path` is None, the function reads `raymq.yaml` in the current directory if the file exists, else returns the
    defaults. Raises ConfigError with the file, the key and the allowed values if a setting is not valid.
    """
    file = Path(DEFAULT_FILE) if path is None else Path(path)
    values = read_settings_file(file) if path is not None or file.exists() else {}
    try:
        given = {key: value for key, value in overrides.items() if value is not None}
        return ClusterSettings.model_validate({**values, **given})
    except ValidationError as error:
        raise ConfigError(explain(str(file) if values else "the settings", error)) from None


PROBLEMS_MAX: Final = 20
"""Maximum number of problems that one error lists. A file with more problems is probably not a settings file."""


def explain(where: str, error: ValidationError, section: str = "") -> str:
    """Describe at most PROBLEMS_MAX invalid settings in one line: each key, its value, and the allowed values.
    `section`: the section that was checked; empty if all sections were checked."""
    problems = []
    for item in error.errors()[:PROBLEMS_MAX]:
        location = (section, *item["loc"]) if section else item["loc"]
        key = _short(".".join(str(part) for part in location))
        if item["type"] == "extra_forbidden":
            problems.append(f"unknown key {key!r}{_hint(location)}")
        else:
            problems.append(f"{key}: {item['msg']}, got {shown(item['input'], SHOWN_MAX)}")
    if error.error_count() > PROBLEMS_MAX:
        problems.append(f"and {error.error_count() - PROBLEMS_MAX} more")
    return f"{where}: " + "; ".join(problems)


def _hint(key_path: tuple[int | str, ...]) -> str:
    """Return the hint for an unknown key: the most similar key of its section, or all keys of the section."""
    section = key_path[0] if len(key_path) > 1 else ""
    model = SETTINGS_SECTIONS.get(str(section), ClusterSettings)
    close = difflib.get_close_matches(str(key_path[-1])[:SHOWN_MAX], list(model.model_fields), n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the keys are {', '.join(model.model_fields)}"


SHOWN_MAX: Final = 200


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}…"
