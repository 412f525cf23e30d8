"""Tests of raymq's type annotations as users see them: a program that uses the whole public interface passes the type
checker.

The checker sees raymq as an installed package. A public signature contains `Any` only for a listed reason.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raydp_jobs
import raymq
import raymq.data
import raymq.serve
from raymq.client.admin.admin import Admin
from raymq.client.admin.dead_letters import DeadLetters
from raymq.client.producer.settings import ProducerOptions, ProducerSettings
from raymq.common.protocol.group import GroupChanges, GroupConfig

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
PROGRAM = (ROOT / "tests/fixtures/typed_program.py").read_text()
WRONG = """

def wrong(mq: raymq.Client) -> None:
    mq.producer("shop", send_timeout=5.0)
    mq.admin.update_group("billing", retries="many")
    assert_type(mq.admin.group_summary("billing").lag, str)
"""
# Skip the types of Ray and Spark: raymq cannot change them, and checking them takes longer than checking all of raymq.
MYPY = "[mypy]\nstrict = True\n[mypy-ray.*,pyspark.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
CHECK_TIMEOUT_S = 200


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a virtual environment `v`. In it, raymq is installed from its wheel, together with its
    dependencies."""
    directory = tmp_path_factory.mktemp("types")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(directory / "v")], check=True, timeout=CHECK_TIMEOUT_S
    )
    site = directory / f"v/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    for package in ("raymq", "raydp_jobs"):
        shutil.copytree(ROOT / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (directory / "mypy.ini").write_text(MYPY)
    (directory / "program.py").write_text(PROGRAM + WRONG)
    return directory


COMMANDS = {
    "mypy": ["--config-file", "mypy.ini", "--python-executable", "v/bin/python", "program.py"],
    "pyright": ["--pythonpath", "v/bin/python", "program.py"],
}


@pytest.mark.parametrize("tool", COMMANDS)
def test_a_users_program_type_checks_except_for_the_errors_at_its_end(installed: Path, tool: str) -> None:
    done = subprocess.run(
        [str(BIN / tool), *COMMANDS[tool]],
        cwd=installed,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        timeout=CHECK_TIMEOUT_S,
        check=False,
    )
    begin = PROGRAM.count("\n") + 1
    lines = {int(line) - begin for line in re.findall(r"program\.py:(\d+)", done.stdout)}
    assert lines == {3, 4, 5}, done.stdout + done.stderr


A_VALUE_OF_THE_USERS = "the user's own value, handed on as it is"
RAYS = "Ray's own type"
OF_RAYS_QUEUE = "ray.util.queue.Queue has it so"
OF_RAY_SERVE = "the base class in Ray Serve has it so"
REASONS = {
    "ConsumeContext.__init__(properties)": A_VALUE_OF_THE_USERS,
    "MessageExt.decoded(values)": "columns of different types, as the kernels decode them",
    "Predicate.__init__(runtime_env)": RAYS,
    "Predicate.in_environment(runtime_env)": RAYS,
    "Queue.__init__(actor_options)": OF_RAYS_QUEUE,
    "Queue.__init__(maxsize)": OF_RAYS_QUEUE,
    "Queue.get(return)": A_VALUE_OF_THE_USERS,
    "Queue.get_async(return)": A_VALUE_OF_THE_USERS,
    "Queue.get_nowait(return)": A_VALUE_OF_THE_USERS,
    "Queue.get_nowait_batch(return)": A_VALUE_OF_THE_USERS,
    "Queue.put(item)": A_VALUE_OF_THE_USERS,
    "Queue.put_async(item)": A_VALUE_OF_THE_USERS,
    "Queue.put_nowait(item)": A_VALUE_OF_THE_USERS,
    "Queue.put_nowait_batch(items)": A_VALUE_OF_THE_USERS,
    "RaymqTaskProcessorAdapter.__init__(args)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.__init__(kwargs)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.enqueue_task_async(args)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.enqueue_task_async(kwargs)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.enqueue_task_async(options)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.enqueue_task_sync(args)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.enqueue_task_sync(kwargs)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.enqueue_task_sync(options)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.get_metrics_async(return)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.get_metrics_sync(return)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.health_check_async(return)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.health_check_sync(return)": OF_RAY_SERVE,
    "RaymqTaskProcessorAdapter.start_consumer(kwargs)": OF_RAY_SERVE,
    "SendContext.__init__(value)": A_VALUE_OF_THE_USERS,
    "TopicDatasink.on_write_start(schema)": RAYS,
    "TransactionProducer.send_in_transaction(argument)": A_VALUE_OF_THE_USERS,
    "predicate(runtime_env)": RAYS,
    "read_topic(fallback_strategy)": RAYS,
    "read_topic(runtime_env)": RAYS,
    "write_topic(ray_remote_args)": RAYS,
}
"""Public signatures that contain Any, each with its reason."""


def public_things() -> Iterator[object]:
    """Yield all objects that users may import, and the classes behind `client.admin`."""
    for module in (raymq, raymq.data, raymq.serve, raydp_jobs):
        yield from (getattr(module, name) for name in module.__all__)
    yield from (Admin, DeadLetters)


def signatures(thing: object) -> Iterator[Callable[..., Any]]:
    """Yield the functions of a public object: the object itself if it is a function, or the public methods and
    properties of a class. Only functions whose code is in raymq are included."""
    if inspect.isfunction(thing):
        yield thing
    elif inspect.isclass(thing):
        for name, member in inspect.getmembers(thing):
            function = inspect.unwrap(member.fget if isinstance(member, property) else member)
            is_ours = inspect.isfunction(function) and function.__module__.startswith(("raymq.", "raydp_jobs."))
            if is_ours and (name == "__init__" or not name.startswith("_")):
                yield function


def test_any_is_in_a_public_signature_only_with_a_reason() -> None:
    functions = {function for thing in public_things() for function in signatures(thing)}
    assert len(functions) > 200
    found = {
        f"{function.__qualname__}({name})"
        for function in functions
        for name, annotation in function.__annotations__.items()
        if re.search(r"\bAny\b", str(annotation))
    }
    assert found == set(REASONS)


@pytest.mark.parametrize(
    ("options", "settings", "own"), [(ProducerOptions, ProducerSettings, set()), (GroupChanges, GroupConfig, {"group"})]
)
def test_the_keyword_arguments_are_the_fields_that_they_set(options: Any, settings: Any, own: set[str]) -> None:
    fields = {name: text for name, text in settings.__annotations__.items() if name not in own}
    assert {name: getattr(hint, "__forward_arg__", hint) for name, hint in options.__annotations__.items()} == fields
