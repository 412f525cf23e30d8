"""Tests of a store's config files. Each file is stored twice, and read in RocketMQ's dialect of JSON."""

from __future__ import annotations

import json
import threading

import pytest

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from storage.files import disk
from storage.files.config_files import ConfigFiles, SealedText, parse_fastjson, seal
from storage.files.damage import DamageNotes
from storage.files.two_copies import DAMAGED_KEPT_MAX


@pytest.fixture
def config(tmp_path):
    return ConfigFiles(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ("{0:5,1:7\n}", {"0": 5, "1": 7}),
        ('{\n\t"offsetTable":{\n\t\t"a@g":{0:5,1:7\n\t\t}\n\t}\n}', {"offsetTable": {"a@g": {"0": 5, "1": 7}}}),
        ("{-1 : 2}", {"-1": 2}),
        ('{"a":"1:2","b":[1,2]}', {"a": "1:2", "b": [1, 2]}),
        (r'{"quote\" 3:":"x {4:5}"}', {'quote" 3:': "x {4:5}"}),
        ('{"perm":6,"order":false,"attributes":{}}', {"perm": 6, "order": False, "attributes": {}}),
        ('{"主题":{0:1}}', {"主题": {"0": 1}}),
    ],
)
def test_fastjson_texts_parse(text, value):
    assert parse_fastjson(text) == value


@pytest.mark.parametrize("text", ["", "{", "{0:5", "{a:5}", "nonsense", '{"a":1} {'])
def test_text_that_is_not_json_with_unquoted_keys_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        parse_fastjson(text)


pytestmark = pytest.mark.usefixtures("no_flushes")

SEALED = SealedText(is_json=True)


def test_both_copies_have_the_newest_text_and_its_version(config):
    config.write("topics.json", '{"v":1}')
    config.write("topics.json", '{"v":2}')
    assert config.read("topics.json") == '{"v":2}'
    for name in ("topics.json", "topics.json.bak"):
        assert SEALED.decode((config.directory / name).read_bytes()) == (b'{"v":2}', 2, True)
    assert sorted(path.name for path in config.directory.iterdir()) == ["topics.json", "topics.json.bak"]


@pytest.mark.parametrize("copies", [1, 2])
def test_a_flipped_bit_anywhere_in_a_file_is_found_and_the_text_is_read(tmp_path, copies):
    text = '{"orders":7}'
    config = ConfigFiles(tmp_path)
    config.write("topics.json", text)
    path = config.directory / "topics.json"
    good = path.read_bytes()
    assert json.loads(good) == {"orders": 7}  # the file is plain JSON, which RocketMQ can read, too
    for position in range(len(good)):
        for bit in range(8):
            if copies == 1:
                path.with_name("topics.json.bak").unlink()
            path.write_bytes(good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :])
            damage = DamageNotes()
            assert ConfigFiles(tmp_path, damage).read("topics.json") == text, (position, bit)
            assert len(damage.texts) == 3 - copies, (position, bit)
            assert path.read_bytes() == good


def test_a_changed_file_is_not_believed_and_one_of_rocketmq_is(tmp_path):
    damage = DamageNotes()
    config = ConfigFiles(tmp_path, damage)
    config.write("topics.json", '{"v":1}')
    config.write("topics.json", '{"v":2}')
    path = config.directory / "topics.json"
    path.write_bytes(path.read_bytes().replace(b"2", b"99"))
    assert config.read("topics.json") == '{"v":2}'
    assert len(damage.texts) == 1
    assert b"99" in path.with_name("topics.json.damaged-1").read_bytes()
    path.write_bytes(b'{"v":3}')
    assert config.read("topics.json") == '{"v":3}'
    assert len(damage.texts) == 1
    config.write("topics.json", '{"v":4}')
    path.unlink()
    assert config.read("topics.json") == '{"v":4}'


@pytest.mark.parametrize("damage", [b"", b'{"v":', b"\xff\xfe", None], ids=["empty", "cut", "not text", "missing"])
@pytest.mark.parametrize("name", ["topics.json", "topics.json.bak"])
def test_a_damaged_copy_is_kept_aside_and_written_again(config, name, damage):
    config.write("topics.json", '{"v":1}')
    config.write("topics.json", '{"v":2}')
    path = config.directory / name
    good = path.read_bytes()
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    assert config.read("topics.json") == '{"v":2}'
    assert path.read_bytes() == good
    kept = [other.read_bytes() for other in config.directory.glob("*.damaged-*")]
    assert kept == ([] if damage is None else [damage])


@pytest.mark.parametrize("name", ["topics.json", "topics.json.bak"])
def test_an_older_version_of_a_copy_is_not_used(config, name):
    config.write("topics.json", '{"v":1}')
    path = config.directory / name
    older = path.read_bytes()
    config.write("topics.json", '{"v":2}')
    config.write("topics.json", '{"v":3}')
    good = path.read_bytes()
    path.write_bytes(older)
    assert config.read("topics.json") == '{"v":3}'
    assert path.read_bytes() == good


def test_damaged_copies_are_kept_up_to_a_bound(config):
    config.write("topics.json", '{"v":1}')
    path = config.directory / "topics.json"
    for number in range(DAMAGED_KEPT_MAX + 3):
        path.write_text(f"damaged {number}")
        assert config.read("topics.json") == '{"v":1}'
    kept = sorted(other.read_text() for other in config.directory.glob("*.damaged-*"))
    assert len(kept) == DAMAGED_KEPT_MAX
    assert f"damaged {DAMAGED_KEPT_MAX + 2}" in kept


def test_files_of_an_earlier_version_have_the_previous_text_as_bak(config):
    path, backup = config.directory / "topics.json", config.directory / "topics.json.bak"
    path.write_bytes(seal(b'{"v":2}'))
    backup.write_bytes(seal(b'{"v":1}'))
    before = path.read_bytes(), backup.read_bytes()
    assert config.read("topics.json") == '{"v":2}'
    assert (path.read_bytes(), backup.read_bytes()) == before
    path.unlink()
    assert config.read("topics.json") == '{"v":1}'
    config.write("topics.json", '{"v":3}')
    backup.unlink()
    assert config.read("topics.json") == '{"v":3}'


def test_a_write_that_a_crash_ended_between_its_renames_is_complete(config, monkeypatch):
    config.write("topics.json", '{"v":1}')
    rename, renamed = disk.rename, []

    def fail_second(source, target):
        renamed.append(target)
        if len(renamed) == 2:
            raise OSError("the process ends")
        rename(source, target)

    monkeypatch.setattr(disk, "rename", fail_second)
    with pytest.raises(OSError, match="the process ends"):
        config.write("topics.json", '{"v":2}')
    monkeypatch.setattr(disk, "rename", rename)
    assert config.read("topics.json") == '{"v":2}'
    (config.directory / "topics.json").unlink()
    assert config.read("topics.json") == '{"v":2}'


def test_a_missing_file_is_none_and_two_damaged_copies_are_an_error_that_changes_nothing(config):
    assert config.read("topics.json") is None
    (config.directory / "topics.json.bak").write_text("{")
    with pytest.raises(StoreCorruptError, match="restore one of the two files"):
        config.read("topics.json")
    (config.directory / "topics.json").write_text("")
    with pytest.raises(StoreCorruptError, match=r"topics\.json is damaged, and its second copy .* is damaged"):
        config.read("topics.json")
    assert sorted(path.name for path in config.directory.iterdir()) == ["topics.json", "topics.json.bak"]


def test_text_that_is_not_json_by_name_is_not_parsed(config):
    config.write("timermetrics", "not json")
    assert config.read("timermetrics") == "not json"


@pytest.mark.parametrize("name", ["", "../lock", "a/b", ".hidden", "a b"])
def test_names_that_leave_the_directory_are_refused(config, name):
    with pytest.raises(InvalidArgumentError):
        config.read(name)
    with pytest.raises(InvalidArgumentError):
        config.write(name, "x")


def test_reading_a_config_file_during_its_replacement_loses_nothing(tmp_path):
    # Two ConfigFiles objects share one directory, as in a cluster: the broker writes its config files, and a thread of
    # the store reads them.
    writer, reader = ConfigFiles(tmp_path), ConfigFiles(tmp_path)
    writer.write("topics.json", "{}")
    ended, seen = threading.Event(), set()

    def read_on():
        while not ended.is_set():
            seen.add(reader.read("topics.json"))

    thread = threading.Thread(target=read_on, daemon=True)
    thread.start()
    try:
        for number in range(60):
            text = f'{{"topics": {number}}}'
            writer.write("topics.json", text)
            assert SEALED.decode((writer.directory / "topics.json").read_bytes()).text == text.encode()
            assert writer.read("topics.json") == text
    finally:
        ended.set()
        thread.join()
    assert None not in seen
