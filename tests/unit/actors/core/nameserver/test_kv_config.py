"""Tests of the NameServer's key-value configuration and of the file that stores it."""

from __future__ import annotations

import json

import pytest

from actors.core.nameserver.kv_config import KvConfig
from raymq.common.errors import InvalidArgumentError, StoreCorruptError
from raymq.common.protocol.route import ORDER_TOPIC_CONFIG


def test_a_value_is_set_and_deleted_in_a_copy():
    empty = KvConfig()
    one = empty.changed("ns", "k", "v")
    assert (one.list("ns"), empty.list("ns")) == ({"k": "v"}, {})
    gone = one.changed("ns", "k", None)
    assert (gone.list("ns"), one.list("ns")) == ({}, {"k": "v"})
    assert gone.changed("other", "k", None).list("other") == {}


def test_the_file_has_rocketmqs_shape_and_comes_back():
    table = KvConfig().changed("ns", "k", "vä").changed("other", "k", "w")
    text = table.dump()
    assert json.loads(text)["configTable"]["ns"] == {"k": "vä"}
    assert KvConfig.load(text).dump() == text


@pytest.mark.parametrize(
    ("namespace", "key", "value"),
    [("", "k", "v"), ("n", " ", "v"), ("n", "k", ""), (None, "k", "v"), ("n", "k", "x" * 70_000), ("n", "k", 5)],
)
def test_invalid_kv_values_are_refused(namespace, key, value):
    with pytest.raises(InvalidArgumentError):
        KvConfig().changed(namespace, key, value)


def test_order_topics_are_not_kept_here():
    with pytest.raises(InvalidArgumentError, match=r"use admin\.set_order_config"):
        KvConfig().changed(ORDER_TOPIC_CONFIG, "orders", "a:4;b:2")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"configTable": []}', '{"configTable": {"n": {"k": 5}}}', '{"configTable": {"n": 5}}']
)
def test_another_file_is_refused(text):
    with pytest.raises(StoreCorruptError):
        KvConfig.load(text)
