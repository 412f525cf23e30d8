"""Tests of bearer tokens: the signature made of a token is accepted by the authorizer of signed calls."""

from __future__ import annotations

import pytest

from raymq.common.errors import AuthenticationError
from raymq.gateway.convert.signatures import authenticate
from raymq.gateway.http.calls import signature_headers

NOW_S = 1_795_400_000.0
SECRETS = {"shop": "5ec4e7", "a.b@c-d_e": "x" * 64}


def user_of(authorization: str) -> str:
    headers = signature_headers(authorization, NOW_S)
    return authenticate(headers.get("authorization", ""), headers.get("x-mq-date-time", ""), SECRETS.get, NOW_S)


@pytest.mark.parametrize("user", SECRETS)
def test_a_token_is_the_signature_of_its_user(user: str) -> None:
    assert user_of(f"Bearer {user}:{SECRETS[user]}") == user
    assert user_of(f" bearer  {user}:{SECRETS[user]} ") == user


@pytest.mark.parametrize(
    "text",
    [
        *("", "Bearer", "Bearer shop", "Bearer shop:", "Bearer :5ec4e7", "Bearer shop:wrong", "Bearer nobody:5ec4e7"),
        *("Basic shop:5ec4e7", "shop:5ec4e7", "Bearer shop:5ec4e7 more", "Bearer sh op:5ec4e7"),
        *("Bearer x,Credential=shop:5ec4e7", f"Bearer {'u' * 65}:x", f"Bearer shop:{'x' * 257}", "Bearer shop:\u00e4"),
        "MQv2-HMAC-SHA1 Credential=shop, SignedHeaders=x-mq-date-time, Signature=00",
    ],
)
def test_another_text_signs_nothing(text: str) -> None:
    with pytest.raises(AuthenticationError):
        user_of(text)
