"""Tests of connecting a process to Ray: what the process tells Ray about its command line."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ray
from raymq.client.cluster.attach import described_as_utf8

before = ray._private.utils.get_entrypoint_name
try:
    before().encode()
except UnicodeEncodeError:
    print("refused")
with described_as_utf8():
    print(ray._private.utils.get_entrypoint_name().encode().decode("ascii").split()[-1])
print(ray._private.utils.get_entrypoint_name is before)
"""


def test_an_argument_that_is_not_utf8_does_not_keep_a_program_from_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, b"caf\xe9"], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == ["refused", "caf\\udce9", "True"]
