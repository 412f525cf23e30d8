"""Checks the signature that clients of the gRPC protocol send with each call.

    authorization: MQv2-HMAC-SHA1 Credential=USER, SignedHeaders=x-mq-date-time, Signature=HEX

HEX is the HMAC-SHA1 of the text in the header x-mq-date-time, with the client's secret. The signature covers the time
only, not the call: whoever reads it can use it again, so it is worth no more than the connection's encryption. Clients
of Python and Java write their local time as if it were UTC, so the time may be wrong by a time zone.

The secret of a user's gRPC clients is derived from the user's key (`raymq.remoting.access.users.gateway_secret`).
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from raymq.common.errors import AuthenticationError

SKEW_MAX_S: Final = 14 * 3600
"""Maximum difference in seconds between the time of a signature and the gateway's clock: the largest time zone."""
_ALGORITHM: Final = "MQv2-HMAC-SHA1"
_HEADER_CHARS_MAX: Final = 1024
_PART: Final = re.compile(r"(Credential|SignedHeaders|Signature)=([^,\s]*)")
_DATE_FORMAT: Final = "%Y%m%dT%H%M%SZ"


def authenticate(authorization: str, date_time: str, secret_of: Callable[[str], str | None], now_s: float) -> str:
    """Return the name of the user that signed a call.

    `authorization`, `date_time`: the headers of the call. `secret_of`: returns a user's secret, None for an unknown or
    disabled user. `now_s`: the time in seconds since 1970. Raises AuthenticationError if a header is missing or
    malformed, if the time is out of range, or if no known user made the signature.
    """
    algorithm, _, rest = authorization[:_HEADER_CHARS_MAX].partition(" ")
    parts: dict[str, str] = dict(_PART.findall(rest))
    user, text = parts.get("Credential", ""), parts.get("Signature", "")
    if algorithm != _ALGORITHM or not user or not text:
        raise AuthenticationError(
            "the call is not signed: give the client a user's name as access key, and the secret that "
            "`raymq user gateway-secret USER` prints"
        )
    _check_date(date_time, now_s)
    secret = secret_of(user)
    # an unknown user takes the time of a known user
    expected = hmac.new((secret or "").encode(), date_time.encode(), hashlib.sha1).digest()
    try:
        signature = bytes.fromhex(text)
    except ValueError:
        signature = b""
    if secret is None or not hmac.compare_digest(signature, expected):
        raise AuthenticationError(
            "no user has this access key and secret; `raymq user gateway-secret USER` prints the secret"
        )
    return user


def _check_date(date_time: str, now_s: float) -> None:
    try:
        signed_s = datetime.strptime(date_time, _DATE_FORMAT).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise AuthenticationError("the header x-mq-date-time is no time such as 20260131T235959Z") from None
    if abs(signed_s - now_s) > SKEW_MAX_S:
        raise AuthenticationError(
            "the time in x-mq-date-time is too far from the gateway's clock: set the client's clock"
        )
