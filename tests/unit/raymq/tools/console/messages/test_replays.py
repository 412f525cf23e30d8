"""Tests of the message replays that a user starts in the console. The replays run in threads that a test can
block."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raymq.client.admin.dead_letters import DeadLetter, Replayed
from raymq.common.errors import InvalidArgumentError, RaymqError, ServiceNotAvailableError
from raymq.tools.console.messages.replays import REPLAYS_AT_ONCE_MAX, REPLAYS_KEPT_MAX, LetterReplay, Replays
from tests.support.console.fake_cluster import fake_message

WAIT_S = 20.0


def replay_of(group: str) -> LetterReplay:
    return LetterReplay(group, "somebody", None, None, 0.0)


def results(*errors: str) -> list[Replayed]:
    return [Replayed(DeadLetter(fake_message(queue_offset=at), "t", False), error) for at, error in enumerate(errors)]


def carried_out(replays: Replays, replay: LetterReplay, letters: Iterator[Replayed]) -> None:
    ended = threading.Event()
    replays.start(replay, lambda: letters, lambda _: ended.set())
    assert ended.wait(WAIT_S)


def test_a_replay_counts_and_keeps_each_result() -> None:
    replays, replay = Replays(), replay_of("g")
    carried_out(replays, replay, iter(results("", "no broker", "")))
    assert (replay.done, replay.failed, replay.running, replay.error) == (2, 1, False, "")
    assert [result.place.queue_offset for result in replay.results] == [2, 1, 0]
    assert replays.of("g") is replay
    assert replays.of("h") is None


def test_an_error_ends_it_and_is_its_outcome() -> None:
    def bring_back() -> Iterator[Replayed]:
        yield from results("")
        raise RaymqError("the broker is gone")

    replay = replay_of("g")
    carried_out(Replays(), replay, bring_back())
    assert replay.outcome == "1 brought back, 0 failed; the broker is gone"


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Yield an event that blocks the replays of the function `held` until the event is set."""
    gate = threading.Event()
    yield gate
    gate.set()


def held(gate: threading.Event) -> Iterator[Replayed]:
    yield from results("")
    assert gate.wait(WAIT_S)
    yield from results("", "")


def test_a_group_has_one_replay_at_a_time_and_a_console_a_few(gate: threading.Event) -> None:
    replays = Replays()
    for number in range(REPLAYS_AT_ONCE_MAX):
        replays.start(replay_of(f"g{number}"), lambda: held(gate))
    with pytest.raises(InvalidArgumentError, match="already running"):
        replays.start(replay_of("g0"), lambda: held(gate))
    with pytest.raises(ServiceNotAvailableError, match="wait until one"):
        replays.start(replay_of("h"), lambda: held(gate))


def test_a_replay_that_is_stopped_ends_with_the_letter_that_it_is_at(gate: threading.Event) -> None:
    replays, replay, ended = Replays(), replay_of("g"), threading.Event()
    replays.start(replay, lambda: held(gate), lambda _: ended.set())
    replays.close()
    gate.set()
    assert ended.wait(WAIT_S)
    assert (replay.error, replay.done) == ("stopped", len(replay.results))
    assert replay.done < 3


def test_old_replays_are_forgotten() -> None:
    replays = Replays()
    for number in range(REPLAYS_KEPT_MAX + 5):
        carried_out(replays, replay_of(f"g{number}"), iter(()))
    assert replays.of("g0") is None
    assert replays.of(f"g{REPLAYS_KEPT_MAX + 4}") is not None


def test_a_replay_without_a_thread_does_not_count_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = Replays()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(ServiceNotAvailableError, match="can't start new thread"):
            replays.start(replay_of("g"), lambda: iter(()))
    assert replays.of("g") is None
    carried_out(replays, replay_of("g"), iter(results("")))
