"""A broadcasting instance's offsets on disk, over crashes at each step."""

from __future__ import annotations

import os

import pytest

from actors.pull.local_offsets import LocalOffsets
from raymq.errors import ServiceNotAvailableError
from raymq.message import MessageQueue

Q, P = MessageQueue("orders", "broker-a", 0), MessageQueue("orders", "broker-b", 3)


def test_what_was_saved_is_loaded_by_the_next_instance(tmp_path):
    directory = tmp_path / "group" / "instance"
    assert LocalOffsets(directory).load() == {}
    LocalOffsets(directory).save({Q: 5, P: 7})
    assert LocalOffsets(directory).load() == {Q: 5, P: 7}


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"offsetTable": [{}]}'])
def test_from_a_damaged_file_the_one_before_is_taken(tmp_path, damage):
    offsets = LocalOffsets(tmp_path)
    offsets.save({Q: 5})
    offsets.save({Q: 6})
    (tmp_path / "offsets.json").write_text(damage)
    assert offsets.load() == {Q: 5}
    (tmp_path / "offsets.json.bak").write_text(damage)
    with pytest.raises(ServiceNotAvailableError, match="repair the file or delete it"):
        offsets.load()


@pytest.mark.parametrize("step", [1, 2])
def test_a_crash_between_any_two_steps_leaves_the_old_or_the_new_offsets(tmp_path, monkeypatch, step):
    offsets = LocalOffsets(tmp_path)
    offsets.save({Q: 5})
    calls = 0
    replace = os.replace

    def failing(source, target):
        nonlocal calls
        calls += 1
        if calls == step:
            raise OSError("no space")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(ServiceNotAvailableError, match="no space"):
        offsets.save({Q: 6})
    monkeypatch.undo()
    assert LocalOffsets(tmp_path).load() == {Q: 5}
    offsets.save({Q: 7})
    assert LocalOffsets(tmp_path).load() == {Q: 7}
