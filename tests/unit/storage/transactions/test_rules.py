"""Tests of the transaction rules in RocketMQ's golden facts 85 to 101. The ids of the tests contain the facts'
numbers."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.common.errors import InvalidArgumentError, TransactionError, TransactionTooLateError
from raymq.common.protocol.transactions import EndTransactionRequest
from storage.dispatch.half_messages import HalfMessage, Outcome, op_body, parse_op_body
from storage.transactions.rules import (
    CheckDecision,
    NamedHalf,
    TransactionRules,
    check_end,
    decide_check,
    immunity_ms,
    wanted_outcome,
)

HOUR_MS = 3_600_000
RULES = TransactionRules(time_out_ms=6000, check_max=15, reserved_ms=72 * HOUR_MS)
BORN_MS = 1_700_000_000_000


def order(**changes: Any) -> EndTransactionRequest:
    return EndTransactionRequest(**{"producer_group": "a", "queue_offset": 4, "physical_offset": 400,
                                    "commit_or_rollback": 8, "transaction_id": "T", **changes})  # fmt: skip


def named(**changes: Any) -> NamedHalf:
    return NamedHalf(**{"transaction_id": "T", "producer_group": "a", "queue_offset": 4, "physical_offset": 400,
                        "born_ms": BORN_MS, "immunity": None, **changes})  # fmt: skip


def half(**changes: Any) -> HalfMessage:
    values = {"transaction_id": "T", "producer_group": "a", "topic": "orders", "queue_offset": 4,
              "physical_offset": 400, "size": 100, "born_ms": BORN_MS, "stored_ms": BORN_MS, "check_times": 0,
              "immunity": None, "earlier": ()}  # fmt: skip
    return HalfMessage(**{**values, **changes})


def test_the_body_of_an_op_record_has_a_comma_after_each_offset():
    """Golden fact 85 of spec/features.md: the body of an op record lists offsets, each followed by a comma."""
    assert op_body([3, 17]) == b"3,17,"
    assert parse_op_body(b"3,17,") == [3, 17]
    assert parse_op_body(b"5,x,,6,") == [5, 6]


@pytest.mark.parametrize(
    ("immunity", "age_ms", "accepted"),
    [
        pytest.param("3", 5000, True, id="86 a value below the time-out counts as the time-out"),
        pytest.param("3", 7000, False, id="86 and not more"),
        pytest.param("30", 29_000, True, id="87 a longer one counts"),
        pytest.param("30", 31_000, False, id="87 and not more"),
        pytest.param("x", 6000, True, id="88 no number counts as the time-out"),
        pytest.param("x", 6001, False, id="88 and not more"),
        pytest.param(None, HOUR_MS, True, id="without the property any age is accepted"),
    ],
)
def test_a_producer_may_end_its_transaction_while_it_is_immune(immunity, age_ms, accepted):
    if accepted:
        check_end(order(), named(immunity=immunity), BORN_MS + age_ms, RULES)
    else:
        with pytest.raises(TransactionTooLateError) as raised:
            check_end(order(), named(immunity=immunity), BORN_MS + age_ms, RULES)
        assert raised.value.code == 604


def test_an_end_from_a_check_is_never_too_late():
    """Golden fact 87 of spec/features.md: a commit or rollback that answers a transaction check is never too
    late."""
    check_end(order(from_transaction_check=True), named(immunity="30"), BORN_MS + HOUR_MS, RULES)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        pytest.param(None, "no half message", id="no record there"),
        pytest.param({"producer_group": "b"}, "producer group 'b', but the request names 'a'", id="94 another group"),
        pytest.param(
            {"transaction_id": "U"}, "has the half message of transaction U, not of transaction T", id="another id"
        ),
        pytest.param({"queue_offset": 5}, "queue offset 5, but the request names 4", id="another queue offset"),
        pytest.param(
            {"physical_offset": 500}, "physical offset 500, but the request names 400", id="another physical offset"
        ),
    ],
)
def test_an_end_that_names_another_half_message_is_refused_with_code_1(found, text):
    with pytest.raises(TransactionError, match=text) as raised:
        check_end(order(), None if found is None else named(**found), BORN_MS, RULES)
    assert raised.value.code == 1


@pytest.mark.parametrize("state", [0, 4, 12 + 8, -1])
def test_an_end_that_is_neither_commit_nor_rollback_is_refused(state):
    """Golden fact 95 of spec/features.md does not apply: raymq refuses a request that is neither commit nor rollback.
    RocketMQ does not answer such a request."""
    with pytest.raises(InvalidArgumentError):
        wanted_outcome(state)


def test_the_two_outcomes_have_rocketmqs_numbers():
    assert (wanted_outcome(8), wanted_outcome(12)) == (Outcome.COMMITTED, Outcome.ROLLED_BACK)


@pytest.mark.parametrize(
    ("immunity", "limit_ms"),
    [
        pytest.param("x", 6000, id="88 no number"),
        pytest.param("-1", 6000, id="88 minus one"),
        pytest.param("3", 3000, id="89 below the time-out, and not raised to it"),
        pytest.param(None, 6000, id="90 none"),
    ],
)
def test_the_immunity_time_of_the_check_loop(immunity, limit_ms):
    assert immunity_ms(immunity, RULES) == limit_ms


@pytest.mark.parametrize(
    ("changes", "age_ms", "decision"),
    [
        pytest.param({}, 5999, CheckDecision.WAIT, id="90 too young"),
        pytest.param({}, 6001, CheckDecision.ASK, id="90 old enough"),
        pytest.param({"immunity": "3"}, 3000, CheckDecision.WAIT, id="89 immune"),
        pytest.param({"immunity": "3"}, 3001, CheckDecision.ASK, id="89 no more"),
        pytest.param({"check_times": 14}, 7000, CheckDecision.ASK, id="91 once more"),
        pytest.param({"check_times": 15}, 7000, CheckDecision.GIVE_UP, id="91 often enough"),
        pytest.param({}, 72 * HOUR_MS + 1000, CheckDecision.GIVE_UP, id="93 as old as files are kept"),
        pytest.param({}, -1, CheckDecision.ASK, id="born in the future"),
        pytest.param({"immunity": "3600", "check_times": 0}, 60_000, CheckDecision.WAIT, id="quirk 1: not counted"),
    ],
)
def test_a_round_of_checks(changes, age_ms, decision):
    assert decide_check(half(**changes), BORN_MS + age_ms, RULES, is_old=True) is decision


@pytest.mark.parametrize("by_ms", [-24 * HOUR_MS, 600_000, 24 * HOUR_MS, 100 * HOUR_MS])
def test_a_wrong_clock_gives_up_no_transaction(by_ms):
    """The clock of the producer or of the store is wrong, but the half message has been in the store for seconds."""
    assert decide_check(half(), BORN_MS + by_ms, RULES, is_old=False) is CheckDecision.ASK
    assert decide_check(half(check_times=15), BORN_MS + by_ms, RULES, is_old=False) is CheckDecision.GIVE_UP
