"""The NameServer's KV table and its file."""

from __future__ import annotations

import json

import pytest

from actors.core.kv_config import KvConfig
from raymq.errors import InvalidArgumentError, StoreCorruptError
from raymq.route import ORDER_TOPIC_CONFIG


def test_a_value_is_set_and_deleted_in_a_copy():
    empty = KvConfig()
    one = empty.changed("ns", "k", "v")
    assert (one.get("ns", "k"), one.list("ns"), empty.get("ns", "k")) == ("v", {"k": "v"}, None)
    gone = one.changed("ns", "k", None)
    assert (gone.get("ns", "k"), gone.list("ns"), one.get("ns", "k")) == (None, {}, "v")
    assert gone.changed("other", "k", None).list("other") == {}


def test_the_file_has_rocketmqs_shape_and_comes_back():
    table = KvConfig().changed("ns", "k", "vä").changed(ORDER_TOPIC_CONFIG, "orders", "a:4;b:2")
    text = table.dump()
    assert json.loads(text)["configTable"]["ns"] == {"k": "vä"}
    assert KvConfig.load(text).dump() == text


@pytest.mark.parametrize(
    ("namespace", "key", "value"),
    [("", "k", "v"), ("n", " ", "v"), ("n", "k", ""), (None, "k", "v"), ("n", "k", "x" * 70_000), ("n", "k", 5)],
)
def test_what_cannot_be_kept_is_refused(namespace, key, value):
    with pytest.raises(InvalidArgumentError):
        KvConfig().changed(namespace, key, value)


def test_an_order_configuration_that_no_client_could_read_is_refused():
    with pytest.raises(InvalidArgumentError):
        KvConfig().changed(ORDER_TOPIC_CONFIG, "orders", "nonsense")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"configTable": []}', '{"configTable": {"n": {"k": 5}}}', '{"configTable": {"n": 5}}',
             '{"configTable": {"ORDER_TOPIC_CONFIG": {"t": "x"}}}']
)  # fmt: skip
def test_another_file_is_refused(text):
    with pytest.raises(StoreCorruptError):
        KvConfig.load(text)
