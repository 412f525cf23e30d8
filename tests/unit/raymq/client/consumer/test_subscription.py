"""Tests of tag expressions and of the messages that they match."""

from __future__ import annotations

import pickle

import pytest

from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import IllegalNameError, InvalidArgumentError
from raymq.records.filters.sql import sql
from raymq.records.format.hashing import tags_code


@pytest.mark.parametrize("expression", [None, "", "*"])
def test_everything_is_wanted_without_a_tag(expression):
    subscription = Subscription.parse("orders", expression)
    assert subscription.tag_codes is None
    assert subscription.matches(None)
    assert subscription.matches("anything")


def test_tag_codes_match_the_consume_queue():
    subscription = Subscription.parse("orders", "paid||refunded || café")
    assert subscription.tag_codes == {tags_code("paid"), tags_code("refunded"), tags_code("café")}


def test_untagged_messages_are_not_wanted_with_tags():
    assert not Subscription.parse("orders", "paid").matches(None)


@pytest.mark.parametrize("expression", ["||", " ", " || ", 5, ["paid"]])
def test_an_expression_that_names_no_tag_is_refused(expression):
    with pytest.raises(InvalidArgumentError, match="contains no tag"):
        Subscription.parse("orders", expression)


def test_the_topic_is_checked():
    with pytest.raises(IllegalNameError):
        Subscription.parse("a.b", "*")


def test_a_subscription_survives_pickling():
    subscription = Subscription.parse("orders", "a || b")
    assert pickle.loads(pickle.dumps(subscription)) == subscription


GOLDEN_TAGS = [
    pytest.param(None, "*", set(), id="77 none"),
    pytest.param("", "*", set(), id="77 empty"),
    pytest.param("*", "*", set(), id="77 star"),
    pytest.param("A||B", "A || B", {"A", "B"}, id="78"),
    pytest.param(" A || B ", "A || B", {"A", "B"}, id="78 blanks"),
    pytest.param("A|B", "A|B", {"A|B"}, id="79"),
    pytest.param("A||", "A", {"A"}, id="81"),
    pytest.param("A", "A", {"A"}, id="83"),
]


@pytest.mark.parametrize(("expression", "description", "tags"), GOLDEN_TAGS)
def test_tags_are_read_as_in_rocketmq(expression, description, tags):
    subscription = Subscription.parse("orders", expression)
    assert (subscription.description, subscription.tags) == (description, tags)
    assert subscription.sql is None


def test_codes_of_tags_are_java_hash_codes():
    # golden fact 78 of spec/features.md §12: two vertical bars separate tags
    assert Subscription.parse("orders", "A||B").tag_codes == {65, 66}
    # golden fact 79 (spec/features.md §12): a single bar is part of the tag
    assert Subscription.parse("orders", "A|B").tag_codes == {66375}


def test_tags_in_another_order_are_the_same_wish():
    descriptions = {Subscription.parse("orders", text).description for text in ("b||a", "a || b", "a||b||a")}
    assert descriptions == {"a || b"}


def test_a_filter_expression_is_the_stores_business():
    subscription = Subscription.parse("orders", sql("price > 5"))
    assert (subscription.sql, subscription.tags, subscription.tag_codes) == ("price > 5", frozenset(), None)
    assert subscription.description == "SQL92: price > 5"
    assert subscription.matches(None)
    assert pickle.loads(pickle.dumps(subscription)) == subscription


@pytest.mark.parametrize("text", [None, "", " "])
# golden fact 82 (spec/features.md §12): an empty filter expression is refused
def test_an_empty_filter_expression_is_an_illegal_argument(text):
    with pytest.raises(InvalidArgumentError):
        sql(text)
