"""Calls at the same time that also work while the interpreter ends.

A `ThreadPoolExecutor` takes no work any more once the main thread has finished, which is before functions registered
with `atexit` run: a client that is closed there still has offsets to commit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_parallel(
    function: Callable[[Item], Result], items: Iterable[Item], *, threads_max: int, name: str
) -> list[Result]:
    """The result of `function` for each item, in the order of the items, of up to `threads_max` calls at a time.

    Returns when all calls have ended. Of several that failed, the exception for the first item is raised then. `name`
    begins the threads' names.
    """
    todo = deque(enumerate(items))
    results: dict[int, Result] = {}
    failures: dict[int, Exception] = {}

    def work() -> None:
        while True:
            try:
                number, item = todo.popleft()
            except IndexError:
                return
            try:
                results[number] = function(item)
            except Exception as error:
                failures[number] = error

    count = min(len(todo), threads_max)
    threads = [threading.Thread(target=work, name=f"{name}-{index}", daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [results[number] for number in sorted(results)]
