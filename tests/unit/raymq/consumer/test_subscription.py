"""Tag expressions and what they match."""

from __future__ import annotations

import pickle

import pytest

from raymq.consumer.subscription import Subscription
from raymq.errors import IllegalNameError, InvalidArgumentError
from raymq.record.hashing import tags_code


@pytest.mark.parametrize("expression", [None, "", "*"])
def test_everything_is_wanted_without_a_tag(expression):
    subscription = Subscription.parse("orders", expression)
    assert subscription.tag_codes is None
    assert subscription.matches(None)
    assert subscription.matches("anything")


def test_the_codes_are_those_of_the_consume_queue():
    subscription = Subscription.parse("orders", "paid||refunded || café")
    assert subscription.tag_codes == {tags_code("paid"), tags_code("refunded"), tags_code("café")}


def test_untagged_messages_are_not_wanted_with_tags():
    assert not Subscription.parse("orders", "paid").matches(None)


@pytest.mark.parametrize("expression", ["||", " ", " || ", 5, ["paid"]])
def test_an_expression_that_names_no_tag_is_refused(expression):
    with pytest.raises(InvalidArgumentError, match="names no tag"):
        Subscription.parse("orders", expression)


def test_the_topic_is_checked():
    with pytest.raises(IllegalNameError):
        Subscription.parse("a.b", "*")


def test_a_subscription_survives_pickling():
    subscription = Subscription.parse("orders", "a || b")
    assert pickle.loads(pickle.dumps(subscription)) == subscription
