"""Tests of the incarnation numbers of actors, which always grow, even if a clock is set back."""

from __future__ import annotations

import ast
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import actors
import placement
import raymq
import storage
from actors.core.rebalance.slot_lease import Drop, Get, Put
from actors.pull.services import EPOCHS_OF_A_LIFE, PullServices
from actors.register import LIVES_KEPT, next_life
from tests.support.group_sim.processes import carry_out

ORDERING = ("epoch", "life", "incarnation", "generation", "version", "sequence")
"""Words by which the test finds numbers that order the incarnations of a process, or that are derived from such a
number. The name of such a number contains one of the words."""
CLOCKS = {"time_ns", "time", "now", "utcnow"}


class Register:
    """Fake of the register in Ray's key-value store, kept in memory."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def carry_out(self, call: Get | Put | Drop) -> Any:
        return carry_out(self.values, call)


def test_each_life_has_a_larger_number_and_old_ones_are_dropped() -> None:
    register = Register()
    lives = [next_life("broker-a", register.carry_out) for _ in range(3 * LIVES_KEPT)]
    assert lives == list(range(1, 3 * LIVES_KEPT + 1))
    assert next_life("broker-b", register.carry_out) == 1
    assert len(register.values) == LIVES_KEPT + 1 + 2


def overtaken(register: Register, at: int) -> list[int]:
    """Return the incarnation numbers of two processes. The first process is paused before its `at`-th call to the
    register (the key-value store that assigns the numbers). The second process starts and gets its number during the
    pause."""
    numbers: list[int] = []
    calls = count(1)

    def carry_out(call: Get | Put | Drop) -> Any:
        if next(calls) == at:
            numbers.append(next_life("a", register.carry_out))
        return register.carry_out(call)

    numbers.append(next_life("a", carry_out))
    return numbers


@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("before", range(3))
def test_lives_that_begin_at_the_same_time_have_different_numbers(before: int, at: int) -> None:
    register = Register()
    numbers = [next_life("a", register.carry_out) for _ in range(before)]
    numbers += overtaken(register, at)
    numbers.append(next_life("a", register.carry_out))
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert numbers[-1] == max(numbers)


def test_the_numbers_of_instances_grow_over_the_lives_of_a_pull_actor() -> None:
    numbers = []
    for life in (1, 2, 3):
        services = PullServices([], "node", "127.0.0.1", life)
        numbers += [services.next_epoch() for _ in range(3)]
        services.close()
    assert numbers == sorted(set(numbers))
    assert numbers[0] >= EPOCHS_OF_A_LIFE


def test_no_number_that_orders_lives_is_read_from_a_clock() -> None:
    found = []
    for package in (actors, placement, storage, raymq):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            text = path.read_text()
            if not any(f".{clock}(" in text for clock in CLOCKS):
                continue  # skip modules that use no clock, because parsing every module takes seconds
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and reads_clock(node.value):
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = [ast.unparse(target).rpartition(".")[2].lower() for target in targets]
                    if any(word in name for name in names for word in ORDERING):
                        found.append(f"{path}:{node.lineno}")
    assert found == []


def reads_clock(value: ast.expr) -> bool:
    """Return whether an expression contains a call that reads the wall clock."""
    calls = [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]
    return any(
        isinstance(func, ast.Attribute)
        and func.attr in CLOCKS
        and isinstance(func.value, ast.Name)
        and func.value.id in ("time", "datetime")
        for func in calls
    )
