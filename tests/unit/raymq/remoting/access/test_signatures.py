"""Tests of the signatures of requests. A signature is valid for one request, for a limited time, and once. A server
accepts requests only from some users."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given, strategies as st

from raymq.common.errors import AuthenticationError, SignedTooEarlyError, SystemBusyError
from raymq.remoting.access.authenticate import ANYBODY, Authenticator
from raymq.remoting.access.signatures import SKEW_MS, SeenNonces, Signature, check, require_fresh, sign
from raymq.remoting.access.state import AuthState
from raymq.remoting.access.users import INTERNAL_USER, User, UserStatus

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
LIFE, NEXT_LIFE = b"l" * 16, b"n" * 16
NOW = 1_700_000
USERS = {
    "team": User("team", KEY),
    "gone": User("gone", KEY, status=UserStatus.DISABLE),
    "old": User("old", KEY, white_addresses="10.0.0.*"),
}
STATE = AuthState(MappingProxyType(USERS))


def signed(nonce: int = 1, *, user: str = "team", key: bytes = KEY, life: bytes = LIFE, now_ms: int = NOW) -> Signature:
    return sign(user, key, "broker-a", "send", b"arguments", life, now_ms, nonce.to_bytes(16, "big"))


def user_of(server: Authenticator, signature: Signature | None, *, payload: bytes = b"arguments", **more: str) -> User:
    return server.user_of(STATE, signature, "broker-a", "send", payload, now_ms=NOW, **more)


def test_a_signature_fits_its_request():
    check(KEY, signed(), "broker-a", "send", b"arguments")


REQUEST = ("broker-a", "send", b"arguments")


@pytest.mark.parametrize(
    "request_", [("broker-b", *REQUEST[1:]), ("broker-a", "pull", b"arguments"), ("broker-a", "send", b"argument")]
)
def test_a_signature_fits_no_other_request(request_):
    with pytest.raises(AuthenticationError, match="does not match"):
        check(KEY, signed(), *request_)


CHANGES = ({"user": "x"}, {"life": NEXT_LIFE}, {"time_ms": NOW + 1}, {"nonce": bytes(16)}, {"mac": bytes(32)})


@pytest.mark.parametrize("change", CHANGES)
def test_no_field_of_a_signature_can_be_changed(change):
    with pytest.raises(AuthenticationError):
        check(KEY, replace(signed(), **change), *REQUEST)


@given(st.text(max_size=5), st.text(max_size=5), st.text(max_size=5), st.text(max_size=5))
def test_the_border_between_actor_and_method_is_signed(actor, method, other_actor, other_method):
    nonce = bytes(16)
    first = sign("team", KEY, actor, method, b"", LIFE, NOW, nonce)
    second = sign("team", KEY, other_actor, other_method, b"", LIFE, NOW, nonce)
    assert (first == second) is ((actor, method) == (other_actor, other_method))


@pytest.mark.parametrize(
    ("apart_ms", "taken"),
    [
        (SKEW_MS, True),
        (-SKEW_MS, True),
        (SKEW_MS + 1, False),
        (-SKEW_MS - 1, False),
    ],
)
def test_a_signature_is_fresh_within_its_window(apart_ms, taken):
    if taken:
        require_fresh(signed(), "broker-a", LIFE, NOW + apart_ms)
    else:
        with pytest.raises(SignedTooEarlyError, match="60001 ms away from the actor's clock"):
            require_fresh(signed(), "broker-a", LIFE, NOW + apart_ms)


@pytest.mark.parametrize(("life", "text"), [(b"", "without the id"), (NEXT_LIFE, "another process")])
def test_a_signature_for_another_process_is_refused_with_the_right_process_id(life, text):
    with pytest.raises(SignedTooEarlyError, match=text) as caught:
        require_fresh(signed(life=life), "broker-a", LIFE, NOW + 7)
    error = pickle.loads(pickle.dumps(caught.value))  # the client receives the error pickled by Ray
    assert (error.actor, error.life, error.now_ms, str(error)) == ("broker-a", LIFE, NOW + 7, str(caught.value))
    require_fresh(signed(life=error.life, now_ms=error.now_ms), "broker-a", LIFE, NOW + 7)


def test_a_request_to_one_process_is_refused_by_the_next_process():
    assert user_of(Authenticator(LIFE), signed()) is USERS["team"]
    for now_ms in range(0, NOW * 2, SKEW_MS):
        with pytest.raises(SignedTooEarlyError):
            Authenticator(NEXT_LIFE).user_of(STATE, signed(), *REQUEST, now_ms=now_ms)


def test_each_process_draws_a_life_of_its_own():
    lives = set()
    for _ in range(100):
        with pytest.raises(SignedTooEarlyError) as caught:
            user_of(Authenticator(), signed())
        lives.add(caught.value.life)
    assert len(lives) == 100


def test_a_repeat_is_refused_as_long_as_its_signature_is_valid():
    seen = SeenNonces()
    early = replace(signed(), time_ms=NOW + SKEW_MS)
    seen.take(early, NOW)
    for later_ms in 0, SKEW_MS, 2 * SKEW_MS:
        with pytest.raises(AuthenticationError, match="repeat"):
            seen.take(early, NOW + later_ms)


def test_nonces_are_forgotten_when_no_signature_with_them_is_valid_any_more():
    seen = SeenNonces()
    seen.take(signed(1), NOW)
    seen.take(signed(2), NOW + 2 * SKEW_MS + 1)
    assert len(seen) == 1


def test_the_memory_of_nonces_is_bounded():
    seen = SeenNonces(most=2)
    seen.take(signed(1), NOW)
    seen.take(signed(2), NOW)
    with pytest.raises(SystemBusyError):
        seen.take(signed(3), NOW)


def test_a_known_user_is_recognised_once_per_signature():
    server = Authenticator(LIFE)
    assert user_of(server, signed()) is USERS["team"]
    with pytest.raises(AuthenticationError, match="repeat"):
        user_of(server, signed())


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        (None, "needs a user"),
        (signed(user="nobody"), "does not exist"),
        (signed(user="gone"), "disabled"),
        (signed(key=OTHER_KEY), "does not match"),
        (signed(user=INTERNAL_USER), "does not exist"),
        (signed(now_ms=NOW - SKEW_MS - 1), "sign the request again"),
    ],
)
def test_nobody_else_is(signature, text):
    with pytest.raises(AuthenticationError, match=text):
        user_of(Authenticator(LIFE), signature)


def test_a_refused_signature_uses_up_no_nonce():
    server = Authenticator(LIFE)
    with pytest.raises(AuthenticationError):
        user_of(server, signed(key=OTHER_KEY))
    assert user_of(server, signed()) is USERS["team"]


def test_raymqs_own_actors_sign_with_their_own_key():
    server = Authenticator(LIFE, internal_key=OTHER_KEY)
    assert user_of(server, signed(user=INTERNAL_USER, key=OTHER_KEY)).is_super
    with pytest.raises(AuthenticationError):
        user_of(server, signed(2, user=INTERNAL_USER, key=KEY))


def test_from_a_users_own_white_address_a_wrong_signature_is_taken_golden_141():
    server, wrong = Authenticator(LIFE), signed(user="old", key=OTHER_KEY)
    assert user_of(server, wrong, address="10.0.0.9") is USERS["old"]
    for address in "10.0.1.9", "":
        with pytest.raises(AuthenticationError):
            user_of(server, wrong, address=address)


def test_an_address_on_the_servers_white_list_needs_nothing():
    server = Authenticator(LIFE, white_list=["10.0.0.*"])
    assert user_of(server, None, address="10.0.0.9") is ANYBODY
    with pytest.raises(AuthenticationError):
        user_of(server, None)
