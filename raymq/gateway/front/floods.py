"""FloodGuard bounds the frames of a client that cost work and carry nothing.

RFC 9113 allows any number of pings, empty frames, settings and resets. Each class has a budget that fills again with
time, so that normal clients never reach the bound.
"""

from __future__ import annotations

from typing import Final

from raymq.gateway.front.frames import Http2Code, Http2ConnectionError

IDLE_FRAMES_MAX: Final = 20_000
"""Number of frames without content that a client may send at once."""
IDLE_FRAMES_PER_S: Final = 5_000
RESETS_MAX: Final = 2_000
"""Number of streams that may be reset at once: twice the maximum of open streams."""
RESETS_PER_S: Final = 200
CLIENT_PING_INTERVAL_S: Final = 10.0
"""Shortest time in s between the pings of a client to which the server sends nothing else."""
PING_STRIKES_MAX: Final = 2
"""Number of early pings at which the connection goes on."""


class FrameBudget:
    """A number of frames that falls with each frame, and rises with time up to its maximum."""

    def __init__(self, frames_max: int, frames_per_s: int, now_s: float) -> None:
        self._max, self._per_s = frames_max, frames_per_s
        self._left, self._at_s = float(frames_max), now_s

    def take(self, now_s: float) -> bool:
        """Count one frame at the time `now_s`. Returns False if the budget is used up."""
        if self._left < 1:
            self._left = min(self._max, self._left + (now_s - self._at_s) * self._per_s)
            self._at_s = now_s
            if self._left < 1:
                return False
        self._left -= 1
        return True


class FloodGuard:
    """The budgets of one connection. Each method raises Http2ConnectionError at a flood."""

    def __init__(self, now_s: float) -> None:
        self._idle = FrameBudget(IDLE_FRAMES_MAX, IDLE_FRAMES_PER_S, now_s)
        self._resets = FrameBudget(RESETS_MAX, RESETS_PER_S, now_s)
        self._pinged_s = float("-inf")
        self._strikes = 0

    def idle_frame(self, now_s: float) -> None:
        """Count a frame that carries no part of a request."""
        if not self._idle.take(now_s):
            raise Http2ConnectionError(Http2Code.ENHANCE_YOUR_CALM, "too many frames without content")

    def reset(self, now_s: float) -> None:
        """Count a stream that ends before its call has an answer, because the client resets it or breaks a rule."""
        if not self._resets.take(now_s):
            raise Http2ConnectionError(Http2Code.ENHANCE_YOUR_CALM, "too many resets of streams")

    def ping(self, now_s: float) -> None:
        """Count a ping of the client, and compare it with the last one."""
        if now_s - self._pinged_s < CLIENT_PING_INTERVAL_S:
            self._strikes += 1
            if self._strikes > PING_STRIKES_MAX:
                # gRPC's clients recognise this text, and ping less often
                raise Http2ConnectionError(Http2Code.ENHANCE_YOUR_CALM, "too_many_pings")
        self._pinged_s = now_s

    def answered(self) -> None:
        """Forgive early pings, because the server has sent an answer: gRPC's clients ping to measure the network."""
        self._strikes, self._pinged_s = 0, float("-inf")
