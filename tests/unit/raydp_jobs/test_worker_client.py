"""Tests of the package archives that a Spark worker imports: the worker reads each archive once, and finds an archive
that is added later."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, sys, zipfile, zipimport
from raydp_jobs.worker_client import spare_archives

def archive(name):
    with zipfile.ZipFile(name + ".zip", "w") as file:
        file.writestr(name + ".py", "value = 1")
    sys.path.append(name + ".zip")

archive("early")
import early
reads = []
read = zipimport._read_directory
zipimport._read_directory = lambda path: reads.append(path) or read(path)
spare_archives()
importlib.invalidate_caches()
assert not reads, reads
archive("later")
import later
assert later.value == 1
"""


def test_archives_are_read_once_and_a_later_one_is_found(tmp_path):
    subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, check=True, timeout=60)
