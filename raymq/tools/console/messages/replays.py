"""Runs replays of dead letters for the console. Each replay runs in its own thread, and its page shows the progress.

A group has at most one running replay. If the console dies during a replay, the replay does not continue. Replayed
letters are marked in the cluster, so the user can choose the remaining letters again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from raymq.client.admin.dead_letters import LetterPlace, Replayed
from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError

REPLAYS_AT_ONCE_MAX: Final = 4
REPLAYS_KEPT_MAX: Final = 100
"""Maximum number of replays that the console keeps, one per group, so that users can see the results of finished
replays."""
REPLAY_RESULTS_SHOWN: Final = 200
REPLAY_RATE_MAX: Final = 1000.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LetterResult:
    """The result of the replay of one dead letter, without the message, whose body may be large. `error` is empty on
    success."""

    place: LetterPlace
    message_id: str
    error: str


@dataclass(slots=True)
class LetterReplay:
    """A replay of a group's dead letters. `wanted`: the number of chosen letters, None for all letters. `results`: the
    most recent results, newest first. `error`: the reason why the replay ended early."""

    group: str
    by: str
    wanted: int | None
    rate: float | None
    started_s: float
    done: int = 0
    failed: int = 0
    results: deque[LetterResult] = field(default_factory=lambda: deque(maxlen=REPLAY_RESULTS_SHOWN))
    error: str = ""
    stopping: bool = False
    ended_s: float | None = None

    @property
    def running(self) -> bool:
        """True while the replay of dead letters is running."""
        return self.ended_s is None

    @property
    def outcome(self) -> str:
        """Text that tells users how many dead letters the replay has handled so far, or at its end."""
        text = f"{self.done} brought back, {self.failed} failed"
        return f"{text}; {self.error}" if self.error else text


class Replays:
    """The console's replays of dead letters. The last replay of each group is kept."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._replays: OrderedDict[str, LetterReplay] = OrderedDict()

    def of(self, group: str) -> LetterReplay | None:
        """Return the last replay of a group's dead letters; None if the group had no replay."""
        with self._lock:
            return self._replays.get(group)

    def start(
        self,
        replay: LetterReplay,
        bring_back: Callable[[], Iterator[Replayed]],
        ended: Callable[[LetterReplay], None] = lambda replay: None,
    ) -> None:
        """Run a replay of dead letters in a new thread, which calls `ended` at the end. Raises InvalidArgumentError if
        a replay of this group is running. Raises ServiceNotAvailableError if REPLAYS_AT_ONCE_MAX replays are running.
        """
        with self._lock:
            before = self._replays.get(replay.group)
            if before is not None and before.running:
                raise InvalidArgumentError(
                    f"a replay of group {replay.group!r} is already running; stop this replay, or wait for its end"
                )
            if sum(other.running for other in self._replays.values()) >= REPLAYS_AT_ONCE_MAX:
                raise ServiceNotAvailableError(
                    f"{REPLAYS_AT_ONCE_MAX} replays are already running; wait until one of them ends"
                )
            self._replays[replay.group] = replay
            self._replays.move_to_end(replay.group)
            self._drop_old()
        name = f"console-replay-{replay.group}"
        try:
            threading.Thread(target=self._run, args=(replay, bring_back, ended), name=name, daemon=True).start()
        except RuntimeError as error:
            with self._lock:
                del self._replays[replay.group]
            raise ServiceNotAvailableError(f"no thread can be started for the replay ({error}); try again") from error

    def _drop_old(self) -> None:
        over = [group for group, replay in self._replays.items() if not replay.running]
        for group in over[: max(0, len(self._replays) - REPLAYS_KEPT_MAX)]:
            del self._replays[group]

    def _run(
        self,
        replay: LetterReplay,
        bring_back: Callable[[], Iterator[Replayed]],
        ended: Callable[[LetterReplay], None],
    ) -> None:
        try:
            for result in bring_back():
                message = result.letter.message
                replay.results.appendleft(LetterResult(result.letter.place, message.message_id, result.error))
                if result.error:
                    replay.failed += 1
                else:
                    replay.done += 1
                if replay.stopping:
                    replay.error = "stopped"
                    break
        except RaymqError as error:
            replay.error = str(error)
        except Exception:
            logger.exception("the replay of the dead letters of group %s failed", replay.group)
            replay.error = "the replay failed; see the console's log"
        replay.ended_s = self._clock()
        ended(replay)

    def close(self) -> None:
        """Stop all running replays. Each replay ends after the dead letter that it currently sends."""
        with self._lock:
            for replay in self._replays.values():
                replay.stopping = True
