"""Interrupts callers of the public methods that run in a helper thread. The interrupts come at each point of the
caller's code, and while the caller waits.

Signal handlers do not run in the helper thread, so the call itself either completes or never begins. The call's result
may be lost, but its resources must be released later. After each interrupt the same client sends and polls, and the
check of the test case must pass. The program prints the number of interrupted points by kind of object and call.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from raymq.common import parallel
from tests.component.interrupts.aside_cases import Case, World
from tests.component.interrupts.interrupter import InterruptedByTestError, Interrupter
from tests.support.clusters.local_cluster import start_cluster
from tests.support.history.waiting import eventually
from tests.unit.raymq.test_forks import kinds

HANG_S = 25
UNINTERRUPTED = 2
"""The program interrupts a call at one point after another. If this number of consecutive attempts ended before their
points, the call has no more points, and the program stops."""
HELPERS_MOST = 3
"""Maximum number of helper threads at the end of the program. A higher number shows that interrupted calls have left
threads that no later call uses."""
ASYNC = {"AsyncPullConsumer"}
"""Kinds of client objects that this program skips, because async_program interrupts their calls."""


class SignallingCall(parallel._HelperCall):
    """A call in a helper thread that sends a signal to the waiting main thread. `moment` is "before" or "after": the
    signal is sent before or after the function runs."""

    moment = ""
    handled = threading.Event()

    def make(self) -> None:
        moment, SignallingCall.moment = SignallingCall.moment, ""
        if moment == "before":
            self._signal()
        elif moment == "after":
            function = self.function

            def call_and_signal(*arguments: Any, **keywords: Any) -> Any:
                try:
                    return function(*arguments, **keywords)
                finally:
                    self._signal()

            self.function = call_and_signal
        super().make()

    def _signal(self) -> None:
        SignallingCall.handled.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        assert SignallingCall.handled.wait(HANG_S), "the main thread does not take signals"


class Program:
    def __init__(self, root: Path, chosen: str) -> None:
        parallel._HelperCall = SignallingCall  # type: ignore[misc]
        parallel.HELPER_IDLE_S = 0.5  # type: ignore[misc]  # lost helpers end soon
        parallel.SIGNAL_LOOK_S = 0.05  # type: ignore[misc]
        self.interrupter = Interrupter()
        self.interrupter.on_handled = SignallingCall.handled.set
        self.world = World(start_cluster(root, store={"flush_disk_type": "ASYNC_FLUSH"}), root)
        self.chosen = chosen
        self.points: dict[str, dict[str, int]] = {}

    def run(self) -> None:
        cases = self.world.cases()
        for kind in kinds():
            wanted = {n for n, f in inspect.getmembers(kind, inspect.isfunction) if hasattr(f, "is_aside")}
            wanted = {name for name in wanted if not name.startswith("_")}
            if kind.__name__ not in ASYNC:
                assert set(cases.get(kind.__name__, {})) == wanted, f"{kind.__name__}: {wanted}"
        for kind_name, calls in cases.items():
            for name, case in calls.items():
                if self.chosen in ("", kind_name, f"{kind_name}.{name}"):
                    began_s = time.monotonic()
                    count = self.try_all(f"{kind_name}.{name}", case, is_first=name == next(iter(calls)))
                    self.points.setdefault(kind_name, {})[name] = count
                    print(f"{kind_name}.{name}: {count} in {time.monotonic() - began_s:.2f} s", file=sys.stderr)
        eventually(lambda: helpers() <= HELPERS_MOST, "the end of helpers that nobody uses", 30.0)
        self.world.mq.close()
        print(json.dumps(self.points))
        sys.stdout.flush()
        faulthandler.cancel_dump_traceback_later()
        os._exit(0)  # Skip the normal exit of Python, because servers run in this process.

    def try_all(self, name: str, case: Case, *, is_first: bool) -> int:
        """Interrupt a call at each point at which a signal handler can run. Also interrupt the caller while it waits
        for the call. Returns the number of interrupts.

        `is_first`: also interrupt the call while no helper thread is idle, so that the call starts a helper thread.
        """
        self.end_alone(name, case)
        count = 0
        for is_cold in (False, True)[: 1 + is_first]:
            point = ended = 0
            while ended < UNINTERRUPTED:
                point += 1
                interrupted = self.one(name, case, partial(self.interrupter.call, case.call, point), is_cold)
                ended = 0 if interrupted else ended + 1
                count += interrupted
        for moment in ("before", "after"):
            assert self.one(name, case, partial(self.while_waiting, case, moment), False), f"{name}: no wait"
            count += 1
        return count

    def one(self, name: str, case: Case, attempt: Callable[[], bool], is_cold: bool) -> bool:
        """Make one interrupted call with `attempt`, and check that the client still works. Returns False if the call
        ended before the point to interrupt."""
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        case.before()
        if is_cold:
            parallel._idle.clear()
        try:
            interrupted = attempt()
        except BaseException as error:
            if case.error is None or not isinstance(error, case.error):
                raise AssertionError(f"{name}: {error!r}") from error
            interrupted = False
        try:
            case.after()
            self.world.works()
        except BaseException as error:
            where = self.interrupter.where or "the wait"
            raise AssertionError(f"{name}: nothing works after an interrupt at {where}") from error
        return interrupted

    def while_waiting(self, case: Case, moment: str) -> bool:
        """Make the call of a test case, and interrupt the calling thread while it waits for the helper thread. Returns
        False if no interrupt occurred."""
        self.interrupter.where = ""
        SignallingCall.moment = moment
        try:
            case.call()
        except InterruptedByTestError:
            return True
        finally:
            SignallingCall.moment = ""
        return False

    def end_alone(self, name: str, case: Case) -> None:
        """Make the call of a test case without an interrupt. Check that the call returns, or raises the error that the
        case expects."""
        case.before()
        raised: BaseException | None = None
        try:
            case.call()
        except Exception as error:
            raised = error
        if case.error is None:
            assert raised is None, f"{name}: {raised!r}"
        else:
            assert isinstance(raised, case.error), f"{name} raises {raised!r}"
        case.after()


def helpers() -> int:
    """Return the number of helper threads."""
    return sum(thread.name == "raymq-aside" for thread in threading.enumerate())


if __name__ == "__main__":
    Program(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "").run()
