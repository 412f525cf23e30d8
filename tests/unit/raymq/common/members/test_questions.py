"""Tests of the answers that clients send to a broker's queries: their wire format and size limits, and the stack traces
of threads."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from raymq.common.members import questions as module
from raymq.common.members.questions import (
    DirectConsumption,
    MemberAnswer,
    RunningInfo,
    RunningQueue,
    ThreadStack,
    decode_answer,
    encode_answer,
    thread_stacks,
)
from raymq.common.message import MessageQueue
from tests.support.clients.fakes import WAIT_S

QUEUE = RunningQueue(MessageQueue("orders", "a", 3), "pulling", 9, 5, None, 4, 400, 2, "late")
INFO = RunningInfo(
    *("c", "10.0.0.1", 7, "m", "billing", "PUSH", "CLUSTERING", {"orders": "*"}),
    queues=(QUEUE,),
    rates={"orders": {"PULL_TPS": 1.5}},
    consumed=5,
    failures=0,
    stacks=(ThreadStack("main", ("a.py:1 f", "a.py:2 g")),),
)


@pytest.mark.parametrize(
    "answer",
    [
        MemberAnswer("no such member"),
        MemberAnswer(running=(INFO, replace(INFO, queues=(), stacks=(), consumed=None))),
        MemberAnswer(consumed=DirectConsumption("c", "m", "EXCEPTION", "Traceback", 1.5)),
    ],
)
def test_an_answer_arrives_as_it_was_sent(answer: MemberAnswer) -> None:
    assert decode_answer(encode_answer(answer)) == answer


def test_an_answer_that_is_too_long_comes_without_stacks_and_then_without_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_stack = replace(INFO, stacks=(ThreadStack("main", ("x" * 5000,)),))
    monkeypatch.setattr(module, "MEMBER_ANSWER_MAX_BYTES", 3000)
    [info] = decode_answer(encode_answer(MemberAnswer(running=(long_stack,)))).running
    assert (info.stacks, info.queues) == ((), (QUEUE,))
    assert "stacks are left out" in info.trouble
    many = replace(INFO, queues=(QUEUE,) * 200, trouble="its own")
    [info] = decode_answer(encode_answer(MemberAnswer(running=(many,)))).running
    assert (info.stacks, info.queues, info.trouble) == ((), (), "its own")


def test_stacks_name_threads_and_their_functions() -> None:
    begun, end = threading.Event(), threading.Event()

    def wait_for_the_end() -> None:
        begun.set()
        end.wait(WAIT_S)

    thread = threading.Thread(target=wait_for_the_end, name="worker-of-this-test")
    thread.start()
    begun.wait(WAIT_S)
    found = {stack.name: stack.frames for stack in thread_stacks()}
    end.set()
    thread.join()
    frames = found["worker-of-this-test"]
    [mine] = [number for number, frame in enumerate(frames) if frame.endswith(" wait_for_the_end")]
    assert "test_questions.py:" in frames[mine]
    assert mine > 0, "the outermost frame comes first"
    assert threading.current_thread().name not in found


def test_the_stacks_of_many_threads_and_frames_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Barrier(4), threading.Event()

    def deep(levels: int) -> None:
        if levels:
            deep(levels - 1)
        else:
            begun.wait(WAIT_S)
            end.wait(WAIT_S)

    threads = [threading.Thread(target=deep, args=(30,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(WAIT_S)
    monkeypatch.setattr(module, "FRAMES_MAX", 10)
    monkeypatch.setattr(module, "THREADS_MAX", 2)
    found = thread_stacks()
    end.set()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(len(stack.frames) <= 10 for stack in found)
