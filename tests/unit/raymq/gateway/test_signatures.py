"""Tests of the signatures with which clients of the gRPC protocol prove who they are."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given, strategies as st

from raymq.common.errors import AuthenticationError
from raymq.gateway.convert.signatures import SKEW_MAX_S, authenticate
from raymq.remoting.access.users import gateway_secret

DATE = "20260131T120000Z"
NOW_S = 1_769_860_800.0  # the same time
SECRETS = {"shop": "sk", "eve": "other"}


def header(user: str = "shop", secret: str = "sk", date: str = DATE, upper: bool = False) -> str:
    text = hmac.new(secret.encode(), date.encode(), hashlib.sha1).hexdigest()
    text = text.upper() if upper else text
    return f"MQv2-HMAC-SHA1 Credential={user}, SignedHeaders=x-mq-date-time, Signature={text}"


def check(authorization: str, date: str = DATE, now_s: float = NOW_S) -> str:
    return authenticate(authorization, date, SECRETS.get, now_s)


def test_the_signature_is_rocketmqs() -> None:
    """The expected text was computed with openssl: printf 20260131T120000Z | openssl dgst -sha1 -hmac sk."""
    assert header().endswith("Signature=1335e9e6835b29014915acfb3e2d31218e76fcce")


@pytest.mark.parametrize("upper", [False, True])
@pytest.mark.parametrize("hours", [0, -14, 14])
def test_a_signature_in_the_time_of_any_zone_is_accepted(upper: bool, hours: int) -> None:
    assert check(header(upper=upper), now_s=NOW_S + hours * 3600) == "shop"


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        header(secret="wrong"),
        header(user="eve"),
        header(user="nobody"),
        header(user=""),
        header(date="20260131T120001Z"),
        header().replace("MQv2", "MQv3"),
        header().replace("Signature=", "Signature=zz"),
        header()[:-2],
    ],
)
def test_a_wrong_signature_is_refused(authorization: str) -> None:
    with pytest.raises(AuthenticationError):
        check(authorization)


@pytest.mark.parametrize("date", ["", "yesterday", "20261331T120000Z", DATE[:-1]])
def test_a_time_that_is_none_is_refused(date: str) -> None:
    with pytest.raises(AuthenticationError, match="no time"):
        check(header(date=date), date)


@pytest.mark.parametrize("skew_s", [SKEW_MAX_S + 1, -SKEW_MAX_S - 1])
def test_an_old_signature_is_refused(skew_s: float) -> None:
    with pytest.raises(AuthenticationError, match="too far"):
        check(header(), now_s=NOW_S + skew_s)


@given(st.text(max_size=200), st.text(max_size=40))
def test_arbitrary_headers_are_refused(authorization: str, date: str) -> None:
    for text in (authorization, f"MQv2-HMAC-SHA1 {authorization}", f"MQv2-HMAC-SHA1 Credential=shop, {authorization}"):
        with pytest.raises(AuthenticationError):
            check(text, date)


def test_the_secret_of_clients_follows_from_the_users_key() -> None:
    assert gateway_secret(b"key") != gateway_secret(b"other key")
    assert len(gateway_secret(b"key")) == 64
