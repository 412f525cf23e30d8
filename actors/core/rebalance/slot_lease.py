"""The lease by which one Rebalance actor holds a slot against the other actors (SlotLease). A slot is a share of all
groups.

At most one process at a time assigns queues to members of a slot's groups, whatever stops, dies or is partitioned.
Ray's GCS serves as the register that decides who holds a slot; it exists as long as the Ray cluster. The register has
three operations: get a value, put a value, and put a value only if none exists. Per slot it contains:

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

A slot stays with the actor that has taken it over, until that actor stops updating the sign of life. `look` does not
call the register itself: it is a generator that yields calls to the register. So the actor and the simulation of a
group (tests/support/group_sim) run the same steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from typing import Any, Final

LOOK_INTERVAL_S: Final = 1.0
VALID_S: Final = 4.0
TAKE_OVER_AFTER_S: Final = 6.0
"""Seconds without a new heartbeat from the process that holds a slot (a share of all consumer groups), after which
another process claims the slot. Longer than Ray takes to restart a killed process."""
VERSION_STEP: Final = 1 << 40
"""Minimum distance between the first generations of a slot's groups in two consecutive epochs. (A slot is a share of
all groups.) Within one epoch, a group's generation grows by less than this."""
CLAIMS_KEPT: Final = 1000
"""Number of newest claims that the register keeps for each slot (a share of all groups). Every epoch of a slot has one
claim; older claims are deleted. No process hangs so long that it still needs a deleted claim."""


@dataclass(frozen=True, slots=True)
class Get:
    """Request to read a key of the register (a key-value store at Ray's GCS). The answer is the key's value, or
    None."""

    key: str


@dataclass(frozen=True, slots=True)
class Put:
    """Request to write a key of the register (a key-value store at Ray's GCS). Without `overwrite`, the key is written
    only if it has no value. The answer is True if the key was written."""

    key: str
    value: str
    overwrite: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Request to remove a key of the register (a key-value store at Ray's GCS)."""

    key: str


Look = Generator[Get | Put | Drop, Any, None]


@dataclass(frozen=True, slots=True)
class Claim:
    """A record by which a Rebalance actor takes a slot (a share of all groups). `server`: the actor's name. `life`: the
    id of the process. `fresh`: True if no lease of an earlier holder is in use."""

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
    """A slot (a share of all groups) as one process of a Rebalance actor sees it: the slot's holder, and whether this
    process is the holder. Not thread-safe.

    `server` and `life` name this process. `home`: True if this process should be the slot's first holder. `lease_s`:
    the longest time, in s, for which the answer to a heartbeat lets a member use its queues.
    """

    def __init__(self, slot: int, server: str, life: str, *, home: bool, lease_s: float, valid_s: float = VALID_S):
        self.slot = slot
        self._server, self._life, self._home = server, life, home
        self._lease_s, self._valid_s = lease_s, valid_s
        self.epoch = 0
        """The latest known epoch of the slot (a share of all groups); 0 before the first claim."""
        self.claim = NOBODY
        """The claim by which a Rebalance actor holds the slot (a share of all groups) in the latest known
        epoch."""
        self.held = False
        """True if this process holds the slot (a share of all groups). In this case `claim` is this process's own entry
        in the register, by which it holds the slot."""
        self.grants_from_s = 0.0
        """The time from which this actor may grant queues of the slot (a share of all groups). At that time all leases
        of earlier holders have ended. Valid while this process holds the slot."""
        self._valid_until_s = float("-inf")
        self._beats = 0
        self._released = False
        self._had_it = False  # True if this process held the slot (a share of all groups) earlier and has lost it
        self._closed = False
        self._seen: tuple[int, int] | None = None
        self._seen_since_s = 0.0

    def valid(self, now_s: float) -> bool:
        """Return True if this process may now answer members of the groups in its slot (a share of all groups)."""
        return self.held and now_s < self._valid_until_s

    def waits_for_old_leases(self, now_s: float) -> bool:
        """Return True if an earlier holder of the slot (a share of all consumer groups) may have granted queues that
        members still use. The new holder must not grant these queues yet."""
        return now_s < self.grants_from_s

    @property
    def holder(self) -> str:
        """The name of the actor that holds the slot (a share of all groups), as last known; empty if no actor has held
        the slot."""
        return self.claim.server

    def look(self, clock: Callable[[], float], wall_ns: Callable[[], int]) -> Look:
        """Check the register (a key-value store in Ray's GCS): stay the holder of the slot (a share of all groups),
        find another holder, or become the holder. Called every LOOK_INTERVAL_S.

        The generator yields calls of the register. If a call fails, the caller may throw the error into the generator.
        The error ends this check, and the next check continues. The register may have executed a failed call.
        """
        if self._closed:
            return
        began_s = clock()
        if not self.held:
            beats = yield from self._read_sign()
            # True if this process itself made the newest claim of the slot, but has not received the register's answer
            # to it. This happens if an earlier check stored the claim in the register, and the answer was lost.
            mine = self.claim.life == self._life
            if not mine and self._may_claim(beats, clock()) and not (yield from self._find_newer()):
                yield from self._make_claim(wall_ns)
            if self.claim.life == self._life:
                self._take_up(clock())
            began_s = clock()
        if self.held:
            yield from self._confirm(began_s)

    def release(self) -> Look:
        """Release the slot (a share of all groups) permanently, because this process closes. The caller must make sure
        that no group of the slot has a member."""
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
        """Read the heartbeat that the holder of this slot (a share of all groups) has stored. Returns the heartbeat's
        number; -1 if the holder has not stored a heartbeat."""
        text = yield Get(self._sign_key)
        sign: dict[str, Any] = {"epoch": 0, "beats": -1, "released": False} if text is None else json.loads(text)
        if sign["epoch"] > self.epoch:
            claim = yield Get(self._claim_key(sign["epoch"]))
            self.epoch, self.claim = sign["epoch"], Claim.parse(claim)
        current = sign["epoch"] == self.epoch
        self._released = current and bool(sign["released"])
        return int(sign["beats"]) if current else -1

    def _find_newer(self) -> Generator[Get | Put | Drop, Any, bool]:
        """Read claims of the slot (a share of all consumer groups) with a higher epoch than the latest known claim.
        Their holders may not have stored a heartbeat yet. Returns True if such a claim exists."""
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
        self.held = True  # set `held` last, because other threads read `held` first and then the attributes set above

    def _let_go(self) -> None:
        self.held, self._had_it = False, True
        self._valid_until_s = float("-inf")

    def _confirm(self, began_s: float) -> Look:
        """Keep holding the slot (a share of all consumer groups) if no other actor has made a newer claim to it.
        Otherwise give the slot up."""
        newer = yield Get(self._claim_key(self.epoch + 1))
        if newer is not None:
            self._let_go()
            self.epoch, self.claim = self.epoch + 1, Claim.parse(newer)
            return
        self._valid_until_s = began_s + self._valid_s
        self._beats += 1
        yield Put(self._sign_key, self._sign(), overwrite=True)
