"""Tests of the process that runs a predicate (a Python filter function): its results, and how it ends if the function
hangs, crashes or exits."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

import raymq
from raymq.client.predicates import process as predicate_process
from raymq.client.predicates.process import PredicateProcess
from raymq.common.protocol.consume_result import StoreLog
from raymq.common.protocol.store import FetchRequest
from raymq.records.format.memory_records import LocatedRecords
from tests.support.clients.watches import MappedStorage
from tests.support.history.waiting import eventually
from tests.support.stores.stores import make_batch, open_store

LATER_S = 1e12


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> tuple[LocatedRecords, StoreLog]:
    """Return records at queue offsets 0 to 19 and the store's log. Each record's body is its offset."""
    store = open_store(tmp_path_factory.mktemp("p") / "store")
    store.append([make_batch([b"%d" % number for number in range(20)])])
    storage = MappedStorage(store)
    [result] = storage.find([FetchRequest("orders", 0, 0, 100)], 1 << 20, 0.0, 1.0)
    store.close()
    files = result.files
    return result.mapped[0], StoreLog(files.root, files.commit_log_file_size, files.consume_queue_file_size)


@pytest.fixture
def start():
    processes = []

    def start(function, **options) -> PredicateProcess:
        processes.append(PredicateProcess(raymq.predicate(function, **options)))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


def test_the_process_reads_the_log_in_place_and_needs_no_ray(start, found):
    records, log = found

    def function(message):
        import sys

        return message.body == b"7" and message.broker_name == "broker-a" and "ray" not in sys.modules

    process = start(function)
    evaluated = process.evaluate(LocatedRecords(b"", *records[1:]), "broker-a", LATER_S, log)
    assert np.flatnonzero(evaluated.matches).tolist() == [7]
    assert process.pid not in (None, os.getpid())


def test_the_process_gets_the_bytes_of_records_that_it_cannot_read_in_place(start, found, tmp_path):
    records, log = found
    process = start(lambda message: message.body == b"7")
    for where in (None, StoreLog(str(tmp_path / "gone"), log.commit_log_file_size, log.consume_queue_file_size)):
        assert np.flatnonzero(process.evaluate(records, "a", LATER_S, where).matches).tolist() == [7]


def test_an_exception_is_named_and_leaves_the_process(start, found):
    process = start(lambda message: 1 / (int(message.body) - 7) > -10)
    evaluated = process.evaluate(*found[:1], "a", LATER_S, found[1])
    assert evaluated.matches.tolist() == [True] * 7
    assert (evaluated.failure, evaluated.ended) == ("ZeroDivisionError: division by zero", False)
    pid = process.pid
    assert process.evaluate(found[0].part(8, 20), "a", LATER_S, found[1]).matches.all()
    assert process.pid == pid


def hangs(message):
    while int(message.body) == 7:
        time.sleep(0.01)
    return True


def hangs_in_c(message):
    import re

    return re.match(r"(a|aa)+$", "a" * 200 + "b") if int(message.body) == 7 else True


def crashes(message):
    import ctypes

    return ctypes.string_at(0) if int(message.body) == 7 else True


def exits(message):
    import os

    return os._exit(3) if int(message.body) == 7 else True


def stands_still(message):
    import os
    import signal

    if int(message.body) == 7:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        os.kill(os.getpid(), signal.SIGSTOP)
    return True


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (hangs, "longer than its time limit of 0.3 s"),
        (hangs_in_c, "longer than its time limit"),
        (crashes, "signal 11"),
        (exits, "exit status 3"),
        (stands_still, "does not answer"),
    ],
)
def test_a_call_that_does_not_return_is_named_and_another_process_continues(start, found, monkeypatch, function, said):
    monkeypatch.setattr(predicate_process, "GRACE_S", 0.3)
    process = start(function, timeout_s=0.3)
    evaluated = process.evaluate(found[0], "a", LATER_S, found[1])
    assert evaluated.matches.tolist() == [True] * 7, "those before it are decided"
    assert said in evaluated.failure
    assert evaluated.ended
    assert process.pid is None
    assert process.evaluate(found[0].part(8, 20), "a", LATER_S, found[1]).matches.all()


@pytest.mark.parametrize(("on_error", "last"), [("match", True), ("skip", False)])
def test_on_error_decides_about_a_call_that_does_not_return(start, found, on_error, last):
    process = start(exits, on_error=on_error)
    evaluated = process.evaluate(found[0], "a", LATER_S, found[1])
    assert evaluated.matches.tolist() == [True] * 7 + [last]
    assert not evaluated.failure


def test_a_function_that_cannot_be_loaded_is_a_failure_whatever_on_error_says(start, found):
    class Bomb:
        def __reduce__(self):
            return (__import__, ("no_such_module_anywhere",))

    bomb = Bomb()
    process = start(lambda message: bomb, on_error="skip")
    evaluated = process.evaluate(found[0], "a", LATER_S, found[1])
    assert not len(evaluated.matches)
    assert "No module named 'no_such_module_anywhere'" in evaluated.failure


def test_close_ends_the_predicates_process(start, found):
    process = start(lambda message: True)
    process.evaluate(found[0], "a", LATER_S, found[1])
    pid = process.pid
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_predicates_process_ends_when_the_runner_is_killed(found, tmp_path):
    """A predicate process ends after its runner was killed, even during a call that holds the interpreter lock."""
    child = tmp_path / "pid"

    def function(message):
        import os
        import re

        child.write_text(str(os.getpid()))
        return re.match(r"(a|aa)+$", "a" * 200 + "b")

    runner = os.fork()
    if not runner:
        PredicateProcess(raymq.predicate(function, timeout_s=1.0)).evaluate(found[0], "a", LATER_S, found[1])
        os._exit(0)
    pid = int(eventually(lambda: child.exists() and child.read_text(), "the function's call"))
    os.kill(runner, signal.SIGKILL)
    os.waitpid(runner, 0)
    eventually(lambda: not os.path.exists(f"/proc/{pid}") or _is_zombie(pid), "the end of its process")


def _is_zombie(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"
