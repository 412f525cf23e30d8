"""Tests of raymq.predicate: its options, its `repr`, and its pickled form."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
import textwrap
import threading

import cloudpickle
import pytest

import raymq
from raymq.client.consumer.subscription import Subscription
from raymq.common.errors import InvalidArgumentError, PredicateFailedError

LIMIT = 5


def expensive(message):
    return float(message.properties["price"]) > LIMIT


def test_the_text_names_the_function_and_its_code():
    assert re.fullmatch(r"predicate expensive [0-9a-f]{12}", raymq.predicate(expensive).text)
    assert raymq.predicate(expensive, name="price").text.startswith("predicate price ")


def test_one_function_has_one_text_wherever_its_file_lies(tmp_path):
    source = """
        LIMIT = 5
        WANTED = {"eu", "us", "asia", "africa", "oceania"}
        def helper(text):
            return float(text) > LIMIT
        def expensive(message):
            return helper(message.properties["price"]) and message.properties["region"] in WANTED
    """
    texts = set()
    for name, seed in (("one", "1"), ("two", "2"), ("three", "3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "users_predicates.py").write_text("#\n" * int(seed) + textwrap.dedent(source))
        script = "import raymq, users_predicates as u; print(raymq.predicate(u.expensive).text)"
        environment = {"PYTHONPATH": f"{tmp_path / name}:{':'.join(sys.path)}", "PYTHONHASHSEED": seed}
        texts.add(
            subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True).stdout
        )
    assert len(texts) == 1, texts
    assert texts != {b""}


@pytest.mark.parametrize(
    "other",
    [
        lambda message: float(message.properties["price"]) > 6,
        lambda message: float(message.properties["cost"]) > 5,
        lambda message, limit=5: float(message.properties["price"]) > limit,
        lambda message: [price for price in (message.properties["price"],) if float(price) > 5],
    ],
)
def test_other_code_has_another_text(other):
    def text(function):
        return raymq.predicate(function, name="price").text

    assert text(lambda message: float(message.properties["price"]) > 5) == text(
        lambda message: float(message.properties["price"]) > 5
    )
    assert text(lambda message: float(message.properties["price"]) > 5) != text(other)


def test_a_value_in_the_closure_counts():
    def above(limit):
        return raymq.predicate(lambda message: len(message.body) > limit).text

    assert above(5) == above(5) != above(6)


def test_a_pickled_predicate_carries_bytes_and_loads_no_function():
    before = raymq.predicate(expensive, on_error="skip", timeout_s=2, runtime_env={"env_vars": {"A": "1"}})
    after = pickle.loads(pickle.dumps(before))
    assert after == before
    assert after.function is None
    assert (after.on_error, after.timeout_s, after.runtime_env) == ("skip", 2.0, {"env_vars": {"A": "1"}})
    assert before != raymq.predicate(expensive, on_error="match", timeout_s=2)
    assert cloudpickle.loads(after.payload).__name__ == "expensive"


def test_a_subscription_has_its_text_as_expression():
    predicate = raymq.predicate(expensive)
    subscription = Subscription.parse("orders", predicate)
    assert (subscription.expression, subscription.tag_codes) == (predicate.text, None)
    assert pickle.loads(pickle.dumps(subscription)) == subscription
    assert subscription != Subscription.parse("orders", raymq.predicate(lambda message: True))


def test_a_runtime_env_of_its_own_stays():
    subscription = Subscription.parse("orders", raymq.predicate(expensive))
    assert subscription.in_environment({"pip": []}).predicate.runtime_env == {"pip": []}
    own = Subscription.parse("orders", raymq.predicate(expensive, runtime_env={}))
    assert own.in_environment({"pip": []}).predicate.runtime_env == {}
    assert Subscription.parse("orders").in_environment({"pip": []}) == Subscription.parse("orders")


@pytest.mark.parametrize(
    ("function", "options", "said"),
    [
        (5, {}, "callable"),
        (expensive, {"name": ""}, "name"),
        (expensive, {"name": "a\nb"}, "name"),
        (expensive, {"on_error": "ignore"}, "on_error"),
        (expensive, {"timeout_s": 0}, "timeout_s"),
        (expensive, {"timeout_s": True}, "timeout_s"),
        (threading.Lock().acquire, {}, "cannot be pickled"),
    ],
)
def test_an_invalid_predicate_is_refused(function, options, said):
    with pytest.raises(InvalidArgumentError, match=said):
        raymq.predicate(function, **options)


def test_the_error_names_the_message_the_reason_and_the_remedy():
    error = pickle.loads(pickle.dumps(PredicateFailedError("predicate p 12", "orders/a/0", 7, "KeyError: 'price'")))
    assert "offset 7 of queue orders/a/0: KeyError: 'price'" in str(error)
    assert "on_error" in str(error)
