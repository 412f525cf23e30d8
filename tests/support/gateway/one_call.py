"""Single calls to a gateway of another process, each in a connection of its own, and the headers that sign them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import grpc

from raymq.gateway.wire.messages import CLASSES
from raymq.gateway.wire.table import METHODS, SERVICE
from tests.support.gateway.gateway_client import ANSWER_S, HOST, METADATA

Headers = Sequence[tuple[str, str]]


def call_gateway(port: int, name: str, request: Any, metadata: Headers = METADATA) -> Any:
    """Call a method of the gateway at a port, and return its answer; for a method with a stream of answers, their list.
    Waits for the port to open."""
    [method] = [one for one in METHODS if one.name == name]

    async def run() -> Any:
        # without this option, a call would reuse the connection of an earlier call
        async with grpc.aio.insecure_channel(f"{HOST}:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
            kind = channel.unary_stream if method.streams_responses else channel.unary_unary
            parse = CLASSES[method.response].FromString
            stub = kind(f"/{SERVICE}/{name}", response_deserializer=parse)
            answer = stub(request.SerializeToString(), metadata=metadata, timeout=ANSWER_S, wait_for_ready=True)
            return [one async for one in answer] if method.streams_responses else await answer

    return asyncio.run(run())


def signed_headers(user: str, access_secret: str) -> Headers:
    """Return the headers of a call that `user` signs now. `access_secret`: as `raymq user gateway-secret` prints it."""
    date = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    signature = hmac.new(access_secret.encode(), date.encode(), hashlib.sha1).hexdigest()
    text = f"MQv2-HMAC-SHA1 Credential={user}, SignedHeaders=x-mq-date-time, Signature={signature}"
    return (("x-mq-client-id", "client-1"), ("x-mq-date-time", date), ("authorization", text))
