"""Tests of the output of `raymq config`, with a fake Admin."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result

from raymq.common.config.live import LiveOptions
from raymq.common.protocol.settings import BrokerConfig


class Settings:
    """Fake settings of two broker groups. One store does not answer."""

    def __init__(self) -> None:
        self.changed: dict[str, Any] = {}
        self.ordered: dict[str, Any] = {}

    def config(self, broker: str | None = None) -> dict[str, BrokerConfig]:
        started = LiveOptions().plain()
        one = BrokerConfig(
            started,
            self.changed,
            {**started, **self.changed, **self.ordered},
            live=frozenset(["store.delete_when"]),
            behind=("storage-x",),
            ordered=self.ordered,
        )
        return {name: one for name in ("broker-a", "broker-b") if broker in (None, name)}

    def set_config(self, name: str, value: Any, broker: str | None = None) -> dict[str, BrokerConfig]:
        self.changed[name] = value
        return self.config(broker)

    def unset_config(self, name: str, broker: str | None = None) -> dict[str, BrokerConfig]:
        self.changed.pop(name, None)
        return self.config(broker)


@pytest.fixture
def admin() -> Settings:
    return Settings()


def test_settings_are_shown_got_set_and_unset(run: Any) -> None:
    def at(*words: str, code: int = 0) -> Result:
        return run("config", *words, code=code)

    assert json.loads(at("show", "--json").output)["settings"] == []
    told = at("set", "deleteWhen", "05", "--broker", "broker-a").output
    assert told == "broker-a has store.delete_when 05 now; storage-x gets the setting when it runs again\n"
    [row, _] = json.loads(at("show", "--json").output)["settings"]
    expected = {
        "broker": "broker-a",
        "setting": "store.delete_when",
        "value": "05",
        "raymq.yaml": "04",
        "changes": "live",
    }
    assert row == expected
    everything = json.loads(at("show", "--effective", "--broker", "broker-a", "--json").output)["settings"]
    assert len(everything) == len(LiveOptions().plain())
    assert at("get", "delete_when").output == "broker-a 05\nbroker-b 05\n"
    assert json.loads(at("unset", "delete_when", "--json").output)["values"] == {"broker-a": "04", "broker-b": "04"}
    assert "raymq starts" in str(at("set", "flushDiskType", "ASYNC_FLUSH", code=1).exception)


def test_the_number_of_replicas_in_sync_is_shown_as_a_command_has_changed_it(run: Any, admin: Settings) -> None:
    name = "replication.min_in_sync_replicas"
    admin.ordered = {"replication.replicas": 1, name: 2}
    for arguments in ([], ["--effective"]):
        output = run("config", "show", "--broker", "broker-a", "--json", *arguments).output
        [row] = [row for row in json.loads(output)["settings"] if row["setting"] == name]
        assert (row["value"], row["raymq.yaml"], row["changes"]) == ("2", "1", "raymq broker replicas")
    assert run("config", "get", "minInSyncReplicas", "--broker", "broker-a").output == "broker-a 2\n"
