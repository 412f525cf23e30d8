"""Tests of a store's config files. A file is replaced atomically, and read in RocketMQ's dialect of JSON."""

from __future__ import annotations

import json
import threading

import pytest

from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from storage.files.config_files import ConfigFiles, parse_fastjson, unseal
from storage.files.damage import DamageNotes


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


def test_the_text_before_is_kept_as_bak(config):
    config.write("topics.json", '{"v":1}')
    config.write("topics.json", '{"v":2}')
    assert config.read("topics.json") == '{"v":2}'
    assert unseal((config.directory / "topics.json.bak").read_bytes()) == (b'{"v":1}', "")
    assert sorted(path.name for path in config.directory.iterdir()) == ["topics.json", "topics.json.bak"]


def test_a_flipped_bit_anywhere_in_a_file_is_found_and_the_text_is_read(tmp_path):
    text = '{"orders":7}'
    config = ConfigFiles(tmp_path)
    config.write("topics.json", text)
    path = config.directory / "topics.json"
    good = path.read_bytes()
    assert json.loads(good) == {"orders": 7}  # the file is plain JSON, which RocketMQ can read, too
    for position in range(len(good)):
        for bit in range(8):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :])
            damage = DamageNotes()
            assert ConfigFiles(tmp_path, damage).read("topics.json") == text, (position, bit)
            assert len(damage.texts) == 1, (position, bit)
            assert path.read_bytes() == good


def test_a_changed_file_is_not_believed_and_one_of_rocketmq_is(tmp_path):
    damage = DamageNotes()
    config = ConfigFiles(tmp_path, damage)
    config.write("topics.json", '{"v":1}')
    config.write("topics.json", '{"v":2}')
    path = config.directory / "topics.json"
    path.write_bytes(path.read_bytes().replace(b"2", b"99"))
    assert config.read("topics.json") == '{"v":1}'
    assert len(damage.texts) == 1
    path.write_bytes(b'{"v":3}')
    assert config.read("topics.json") == '{"v":3}'
    assert len(damage.texts) == 1


@pytest.mark.parametrize("damage", [b"", b'{"v":', b"\xff\xfe", None], ids=["empty", "cut", "not text", "missing"])
def test_a_damaged_file_is_dropped_and_its_bak_is_read(config, damage):
    config.write("topics.json", '{"v":1}')
    config.write("topics.json", '{"v":2}')
    path = config.directory / "topics.json"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    assert config.read("topics.json") == '{"v":1}'
    assert not path.exists()


def test_a_missing_file_is_none_and_a_damaged_backup_is_an_error(config):
    assert config.read("topics.json") is None
    (config.directory / "topics.json.bak").write_text("{")
    with pytest.raises(StoreCorruptError, match="restore one of the two files"):
        config.read("topics.json")


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
            assert unseal((writer.directory / "topics.json").read_bytes()) == (text.encode(), "")
            assert writer.read("topics.json") == text
    finally:
        ended.set()
        thread.join()
    assert None not in seen
