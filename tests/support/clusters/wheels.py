"""Builds distributions of raymq as they are released, and small distributions of other projects.

raymq is built from a copy of the checkout. A build leaves `build/` and `*.egg-info` in its directory, and a later build
in the same directory would pack these files.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
BUILD_S = 120.0
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def build_raymq(directory: Path) -> tuple[Path, Path]:
    """Build raymq's source distribution in `directory`, and build a wheel from that source distribution. Returns both
    paths."""
    checkout = directory / "checkout"
    shutil.copytree(REPOSITORY, checkout, ignore=NOT_SOURCE)
    source = directory / _build("build_sdist", checkout, directory)
    with tarfile.open(source) as archive:
        archive.extractall(directory, filter="data")
    return source, directory / _build("build_wheel", directory / source.name.removesuffix(".tar.gz"), directory)


def pip_cache() -> str:
    """Return the directory of pip's cache, so that an installation with another home directory can use the cache."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, timeout=BUILD_S, check=True
    )
    return done.stdout.strip()


def _build(what: str, project: Path, directory: Path) -> str:
    """Build a distribution with setuptools, as pip does without build isolation. Returns the file name of the
    distribution."""
    program = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    done = subprocess.run(
        [sys.executable, "-c", program, what, str(directory)],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def make_wheel(directory: Path, name: str, files: Mapping[str, str]) -> Path:
    """Make a wheel that installs `files`, which maps each path inside site-packages to the file's text."""
    info = f"{name}-1.0.dist-info"
    all_files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: raymq's tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in all_files.items()]
    all_files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    wheel = directory / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in all_files.items():
            archive.writestr(path, text)
    return wheel


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
