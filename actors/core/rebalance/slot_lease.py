"""SlotLease: one Rebalance actor's claim to a slot, a share of all consumer groups, against the other actors.

At most one process at a time answers members of a slot's groups with queues, whatever stops, dies or is cut off. The
register that decides is Ray's GCS, which exists as long as the Ray cluster. It can do three things: get a value, put a
value, and put a value only if none exists. Per slot it contains:

    SLOT/EPOCH   a claim: written once and never changed. Its writer holds the slot from this epoch on.
    SLOT         the sign of life: the holder of the latest epoch rewrites it at every check

The rules:

1. A holder answers members only for VALID_S after the *beginning* of a check that found no newer claim.
   A process that hung, or cannot reach the register, therefore stops answering by its own clock.
2. Another process claims the next epoch once the sign of life has not changed for TAKE_OVER_AFTER_S, by its own clock;
   the process that Ray has started in place of the holder claims it at once. Of two claims, the register accepts one.
3. After a claim, leases of the previous holder may still be in use. They began with heartbeats that were
   answered no later than VALID_S after the claim. So a new holder rebuilds its groups from the members' heartbeats,
   which name the held queues, and grants unreported queues only after VALID_S and one session.
   A first holder, or one after a holder that had no members when it closed, need not wait.
4. Versions (where a group's generations begin) grow from claim to claim, even if wall clocks disagree. A member that
   has seen a newer generation does not follow an older one (raymq.client.consumer.rebalance_client).

A slot stays with the actor that has taken it over, until that actor stops giving signs of life. Pure: `look` is a
generator of calls to the register, so that the actor and the simulation of a group (tests/support/group_sim) run the
same steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import Any, Final

LOOK_INTERVAL_S: Final = 1.0
VALID_S: Final = 4.0
TAKE_OVER_AFTER_S: Final = 6.0
"""Longer than Ray takes to start a killed process again."""
VERSION_STEP: Final = 1 << 40
"""More than a group's generation grows in one epoch."""
CLAIMS_KEPT: Final = 1000
"""Claims that are this many epochs old are dropped. No process hangs for as long as that takes."""


@dataclass(frozen=True, slots=True)
class Get:
    """Read a key of the register: its value, or None."""

    key: str


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key of the register. Without `overwrite`, write only if it has no value. The answer is True if
    written.
    """

    key: str
    value: str
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove a key of the register."""

    key: str


Look = Generator[Get | Put | Drop, Any, None]


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim. `server`: the actor's name; `life`: the process; `fresh`: no lease of an earlier holder is in use."""

    server: str
    life: str
    version: int
    fresh: bool

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Claim:
        return cls(**json.loads(text))


NOBODY: Final = Claim("", "", 0, fresh=True)


class SlotLease:
    """One process's view of one slot. Not thread-safe.

    `server` and `life` name this process. `home`: this process should have the slot first. `lease_s`: the longest time
    for which an answer lets a member use its queues.
    """

    def __init__(self, slot: int, server: str, life: str, *, home: bool, lease_s: float, valid_s: float = VALID_S):
        self.slot = slot
        self._server, self._life, self._home = server, life, home
        self._lease_s, self._valid_s = lease_s, valid_s
        self.epoch = 0
        """The latest epoch known; 0 before the first claim."""
        self.claim = NOBODY
        """The claim of `epoch`."""
        self.held = False
        """True if `claim` is this process's claim."""
        self.grants_from_s = 0.0
        """While the slot is held: the time from which no lease of an earlier holder is in use."""
        self._valid_until_s = float("-inf")
        self._beats = 0
        self._released = False
        self._had_it = False  # this process has held the slot, and lost it
        self._closed = False
        self._seen: tuple[int, int] | None = None
        self._seen_since_s = 0.0

    def valid(self, now_s: float) -> bool:
        """True if this process may answer members of the slot's groups now."""
        return self.held and now_s < self._valid_until_s

    def waits_for_old_leases(self, now_s: float) -> bool:
        """True while leases of an earlier holder may be in use."""
        return now_s < self.grants_from_s

    @property
    def holder(self) -> str:
        """The last known name of the actor that holds the slot; empty if no actor ever held it."""
        return self.claim.server

    def look(self, clock: Callable[[], float], wall_ns: Callable[[], int]) -> Look:
        """Check the register, once every LOOK_INTERVAL_S: stay the holder, find another holder, or become the holder.

        The caller may throw a failed call of the register into the generator. That ends this check, and the next one
        continues. A failed call may have been carried out even so.
        """
        if self._closed:
            return
        began_s = clock()
        if not self.held:
            beats = yield from self._read_sign()
            mine = self.claim.life == self._life  # the answer to a claim was lost
            if not mine and self._may_claim(beats, clock()) and not (yield from self._find_newer()):
                yield from self._make_claim(wall_ns)
            if self.claim.life == self._life:
                self._take_up(clock())
            began_s = clock()
        if self.held:
            yield from self._confirm(began_s)

    def release(self) -> Look:
        """Give the slot up for good, because this process closes. Call it only if none of its groups has a member."""
        self._closed = True
        if self.held:
            self._let_go()
            yield Put(self._sign_key, self._sign(released=True), overwrite=True)

    @property
    def _sign_key(self) -> str:
        return f"{self.slot}"

    def _claim_key(self, epoch: int) -> str:
        return f"{self.slot}/{epoch}"

    def _sign(self, *, released: bool = False) -> str:
        return json.dumps({"epoch": self.epoch, "beats": self._beats, "released": released})

    def _read_sign(self) -> Generator[Get | Put | Drop, Any, int]:
        """Read the holder's sign of life. Returns its count of checks; -1 if the holder has given none."""
        text = yield Get(self._sign_key)
        sign: dict[str, Any] = {"epoch": 0, "beats": -1, "released": False} if text is None else json.loads(text)
        if sign["epoch"] > self.epoch:
            claim = yield Get(self._claim_key(sign["epoch"]))
            self.epoch, self.claim = sign["epoch"], Claim.parse(claim)
        current = sign["epoch"] == self.epoch
        self._released = current and bool(sign["released"])
        return int(sign["beats"]) if current else -1

    def _find_newer(self) -> Generator[Get | Put | Drop, Any, bool]:
        """Find claims whose holders have given no sign of life yet. Returns True if there are any."""
        found = False
        while (text := (yield Get(self._claim_key(self.epoch + 1)))) is not None:
            self.epoch, self.claim, self._released = self.epoch + 1, Claim.parse(text), False
            found = True
        return found

    def _may_claim(self, beats: int, now_s: float) -> bool:
        if self._seen != (self.epoch, beats):
            self._seen, self._seen_since_s = (self.epoch, beats), now_s
        follows = self.claim.server == self._server and not self._had_it
        if follows or (self._home and (self.epoch == 0 or self._released)):
            return True
        return now_s - self._seen_since_s >= TAKE_OVER_AFTER_S

    def _make_claim(self, wall_ns: Callable[[], int]) -> Look:
        version = max(wall_ns(), self.claim.version + VERSION_STEP)
        claim = Claim(self._server, self._life, version, fresh=self.epoch == 0 or self._released)
        won = yield Put(self._claim_key(self.epoch + 1), claim.text(), overwrite=False)
        if won:
            self.epoch, self.claim, self._released = self.epoch + 1, claim, False
            if self.epoch > CLAIMS_KEPT:
                yield Drop(self._claim_key(self.epoch - CLAIMS_KEPT))

    def _take_up(self, now_s: float) -> None:
        self.grants_from_s = now_s if self.claim.fresh else now_s + self._valid_s + self._lease_s
        self.held = True  # set last, because other threads read it

    def _let_go(self) -> None:
        self.held, self._had_it = False, True
        self._valid_until_s = float("-inf")

    def _confirm(self, began_s: float) -> Look:
        """Stay valid if there is no newer claim; otherwise give the slot up."""
        newer = yield Get(self._claim_key(self.epoch + 1))
        if newer is not None:
            self._let_go()
            self.epoch, self.claim = self.epoch + 1, Claim.parse(newer)
            return
        self._valid_until_s = began_s + self._valid_s
        self._beats += 1
        yield Put(self._sign_key, self._sign(), overwrite=True)
