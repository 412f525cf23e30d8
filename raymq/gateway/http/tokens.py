"""Turns the bearer token of a request into the signature of RocketMQ's clients, which the gateway's authorizer checks.

    Authorization: Bearer USER:SECRET

USER is a user of raymq, and SECRET the user's gateway secret (`raymq user gateway-secret`). The gateway derives this
secret from the user's key. So no token is issued, stored or revoked: a change of the user's own secret, or a disabled
user, ends the token. curl and web hooks cannot sign each call's time, so this module signs the present time for them.
One authorizer (`GatewayAccess`) then decides about both faces.

A token is a secret that travels with each request. So a gateway with access on needs TLS, except on loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from datetime import UTC, datetime
from typing import Final

_TOKEN: Final = re.compile(r"[Bb]earer +([A-Za-z0-9_.@-]{1,64}):([!-~]{1,256})")


def signature_headers(authorization: str, now_s: float) -> dict[str, str]:
    """Return the headers that sign a call made at `now_s`, in s since 1970, with the token in `authorization`.

    Returns no header if the text is no token: the authorizer refuses the call if access is on.
    """
    token = _TOKEN.fullmatch(authorization.strip())
    if token is None:
        return {}
    date = datetime.fromtimestamp(now_s, UTC).strftime("%Y%m%dT%H%M%SZ")
    signature = hmac.new(token[2].encode(), date.encode(), hashlib.sha1).hexdigest()
    return {
        "x-mq-date-time": date,
        "authorization": f"MQv2-HMAC-SHA1 Credential={token[1]}, SignedHeaders=x-mq-date-time, Signature={signature}",
    }
