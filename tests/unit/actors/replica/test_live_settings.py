"""Tests of the settings of a storage actor that can change while it runs. The actor keeps them in a file, and the
components of its store apply them. Each family of settings has one test."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from actors.core.replica.append_limit import AppendLimit
from actors.replica.live_settings import LIVE_SETTINGS_FILE, StoreLiveSettings
from raymq.common.config.store import StoreSettings
from raymq.common.errors import SystemBusyError
from storage.message_store import MessageStore


def test_changes_are_kept_in_a_file_and_hold_until_others_do(tmp_path: Path):
    settings = StoreSettings(store_path_root_dir=tmp_path, file_reserved_time_hours=24)
    written: dict[str, str] = {}
    live = StoreLiveSettings(settings)
    live.store({"store.file_reserved_time_hours": 48, "broker.default_topic_queue_nums": 2}, written.__setitem__)
    assert settings.file_reserved_time_hours == 48
    assert json.loads(written[LIVE_SETTINGS_FILE]) == {"store.file_reserved_time_hours": 48}

    again = StoreSettings(store_path_root_dir=tmp_path, file_reserved_time_hours=24)
    reopened = StoreLiveSettings(again)
    reopened.read(written.pop(LIVE_SETTINGS_FILE))
    assert again.file_reserved_time_hours == 48
    reopened.store({"store.file_reserved_time_hours": 48}, written.__setitem__)
    assert written == {}  # the file already contains this setting, so nothing is written
    reopened.store({}, written.__setitem__)
    assert (again.file_reserved_time_hours, json.loads(written[LIVE_SETTINGS_FILE])) == (24, {})


@pytest.mark.parametrize("text", ["", "[]", "{", '{"store.gone": 1}', '{"store.delete_when": "99"}'])
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path: Path, caplog, text):
    settings = StoreSettings(store_path_root_dir=tmp_path)
    StoreLiveSettings(settings).read(text)
    assert settings == StoreSettings(store_path_root_dir=tmp_path)
    assert LIVE_SETTINGS_FILE in caplog.text or "is ignored" in caplog.text


def test_an_open_store_applies_live_settings(tmp_path: Path):
    settings = StoreSettings(store_path_root_dir=tmp_path, mapped_file_size_commit_log_bytes=1 << 16)
    live = StoreLiveSettings(settings)
    store = MessageStore.open(settings, broker_name="broker-a")
    try:
        live.take(
            {
                "store.sync_flush_timeout_ms": 1234,
                "store.fetch_waiters_max": 1,
                "store.disk_space_warning_level_ratio": 35,
                "store.disk_max_used_space_ratio": 10,
                "store.transaction_check_max": 3,
                "store.clean_file_forcibly_enable": True,
            }
        )
        store.follow_settings()
        assert store.gate.timeout_s == 1.234
        assert store.transactions._rules.check_max == 3
        # The result is a list only if the setting clean_file_forcibly_enable is on. If it is off, `deleted_young`
        # returns None.
        assert store.cleaner.deleted_young() == []
        store.cleaner.run_once(datetime.now())
        with store.polls.waiting([("orders", 0)]), pytest.raises(SystemBusyError, match="fetch_waiters_max"):
            store.polls.register([("orders", 0)], lambda: None)
    finally:
        store.close()


def test_an_append_limit_may_change():
    limit = AppendLimit(1)
    with limit.enter():
        limit.capacity = 2
        with limit.enter(), pytest.raises(SystemBusyError):
            limit.begin()
