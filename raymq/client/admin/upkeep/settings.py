"""Administration: the settings of broker groups, seen and changed while raymq runs."""

from __future__ import annotations

from raymq.client.admin.base import AdminBase
from raymq.common.config.live import SettingValue, live_name
from raymq.common.errors import InvalidArgumentError
from raymq.common.protocol.route import PERM_READ, PERM_WRITE
from raymq.common.protocol.settings import BrokerConfig


class SettingsAdmin(AdminBase):
    """Calls about settings. All of them may be repeated."""

    def config(self, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """The settings of all broker groups, or of one, by its name. InvalidArgumentError: there is none of that name.
        ServiceNotAvailableError or RequestTimeoutError when one does not answer within 20 s."""
        return {name: self._call_broker(name, "config") for name in self._groups_of(broker_name)}

    def set_config(self, name: str, value: SettingValue, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Change a live setting of all broker groups, or of one; returns their settings then.

        `name` is a setting of raymq.yaml (``store.delete_when``, ``delete_when``), or RocketMQ's (``deleteWhen``). It
        is kept in the log of each group, over restarts and failovers, until `unset_config`. On return it is in effect
        in all servers that answer (BrokerConfig.behind names the others).

        InvalidArgumentError: no such setting or broker group, or one that is read only when raymq starts. ConfigError:
        a value that raymq.yaml could not have. Groups are changed in order: when one is away, the error is raised and
        those before it have changed.
        """
        full = live_name(name)
        return {group: self._call_broker(group, "set_config", full, value) for group in self._groups_of(broker_name)}

    def unset_config(self, name: str, broker_name: str | None = None) -> dict[str, BrokerConfig]:
        """Have a live setting be as raymq.yaml says, in all broker groups or in one. As `set_config`."""
        full = live_name(name)
        return {group: self._call_broker(group, "unset_config", full) for group in self._groups_of(broker_name)}

    def set_broker_writable(self, broker_name: str, writable: bool) -> None:
        """Let messages be sent to a broker group, or to the others only (the setting broker_permission, which outlives
        restarts). What it holds can be read in either case. Clients see it in routes within half a minute.

        Messages without a key go to the other groups then. A sharding key keeps its queue, so those of this group are
        refused with NoPermissionError. InvalidArgumentError: there is no such group.
        """
        self.set_config("broker.broker_permission", PERM_READ | PERM_WRITE if writable else PERM_READ, broker_name)

    def _groups_of(self, broker_name: str | None) -> list[str]:
        names = self._broker_names()
        if broker_name is None:
            return sorted(names)
        if broker_name not in names:
            raise InvalidArgumentError(f"no broker group is called {broker_name!r}; see `raymq status`")
        return [broker_name]
