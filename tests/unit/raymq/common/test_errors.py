"""Tests that every error class has a code and a text, and can be pickled."""

from __future__ import annotations

import inspect
import pickle

import cloudpickle
import pytest

from raymq.common import errors
from raymq.common.errors import FilterExpressionError, IllegalNameError, RaymqError
from raymq.common.names import check_group, check_topic, light_queue
from raymq.records.filters.sql import SqlFilter

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RaymqError)]
VALUES = {
    "int": 7,
    "float": 1.5,
    "float | None": 2.5,
    "str": "some text",
    "bytes": b"some bytes",
    "bool": True,
    "tuple[str, ...]": ("orders", "payments"),
}


def example(kind: type[RaymqError]) -> RaymqError:
    """Return an error of the class `kind` with a value for each field of the class."""
    if "__init__" not in vars(kind):
        parent = next(base for base in kind.__mro__ if "__init__" in vars(base))
        if not issubclass(parent, RaymqError):
            return kind("what happened; what to do")
        kind_of_fields = parent
    else:
        kind_of_fields = kind
    fields = list(inspect.signature(kind_of_fields.__init__).parameters.values())[1:]
    return kind(*[VALUES[field.annotation] for field in fields])


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_an_error_survives_pickling_with_its_text_and_its_fields(kind, pickler):
    error = example(kind)
    copy = pickle.loads(pickler.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) != ""
    assert copy.args == error.args
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_has_a_response_code_and_a_retryable_flag(kind):
    assert isinstance(kind.code, int)
    assert kind.code > 0
    assert isinstance(kind.retryable, bool)


def test_the_tree_at_the_top_of_the_module_is_the_tree():
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        words = line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()
        if words and words[0].endswith("Error") and len(words) > 1 and words[1].isdigit():
            drawn[words[0]] = (int(words[1]), "retryable:" in words)
    actual = {kind.__name__: (kind.code, kind.retryable) for kind in CLASSES if kind is not RaymqError}
    # In the drawing of the error classes, only a parent class is marked as retryable. Its subclasses inherit the flag.
    assert {name: code for name, (code, _) in drawn.items()} == {name: code for name, (code, _) in actual.items()}
    assert {name for name, (_, retryable) in drawn.items() if retryable} <= {
        name for name, (_, retryable) in actual.items() if retryable
    }


def test_a_timeout_is_also_pythons_timeout_and_bad_arguments_are_value_errors():
    assert issubclass(errors.RequestTimeoutError, TimeoutError)
    for kind in (errors.InvalidArgumentError, errors.MessageIllegalError, errors.ConfigError):
        assert issubclass(kind, ValueError)


def test_a_send_whose_outcome_is_unknown_is_not_retryable_because_a_new_send_is_a_new_message():
    assert not errors.SendUnknownError.retryable


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            errors.TopicNotExistError("ordrs", ("orders", "order")),
            "topic 'ordrs' does not exist; did you mean 'orders' or 'order'? "
            "Otherwise create it: `raymq topic create ordrs`",
        ),
        (errors.TopicNotExistError("a|b"), "topic 'a|b' does not exist; create it: `raymq topic create 'a|b'`"),
        (errors.TopicNotExistError("%DLQ%billing"), "topic '%DLQ%billing' does not exist: brokers create it"),
        (errors.GroupNotExistError("bill", ("billing",)), "'bill' does not exist; did you mean 'billing'? Otherwise"),
        (errors.GroupNotExistError("bill"), "or create it: `raymq group create bill`"),
        (errors.UserNotExistError("alic", ("alice",)), "user 'alic' does not exist; did you mean 'alice'? Otherwise"),
    ],
)
def test_an_error_about_an_unknown_name_suggests_names_before_it_advises_to_create_one(error, text):
    assert text in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "text", ["a = 1 AND " * 3000, "a" * 30_000 + " = ", "a = '" + "x" * 30_000, "a " + "b" * 30_000, "||" * 15_000]
)
def test_an_error_about_a_long_filter_shows_the_part_around_the_fault(text: str) -> None:
    with pytest.raises(FilterExpressionError) as caught:
        SqlFilter(text)
    error = caught.value
    assert len(str(error)) < 600
    assert error.text == text
    assert text[max(0, error.position - 60) : error.position - 1] in str(error)


def test_names_that_are_no_text_or_too_long_have_a_short_error() -> None:
    for wrong, reason in ((["t"], "one text .* not list"), (b"t", "not bytes"), (None, "not NoneType"), (" ", "blank")):
        for check in (check_topic, check_group, light_queue):
            with pytest.raises(IllegalNameError, match=reason):
                check(wrong)  # type: ignore[arg-type]  # the test's point
    for check in (check_topic, check_group, light_queue):
        with pytest.raises(IllegalNameError, match="characters") as caught:
            check("t" * 10_000)
        assert len(str(caught.value)) < 400
