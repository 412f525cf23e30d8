"""Actor classes as Ray and other programs get them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest

from actors.broker import Broker
from actors.core.route_table import RouteTable
from actors.nameserver import NameServer
from actors.pull import Pull
from actors.rebalance import Rebalance
from actors.shell import shell
from actors.storage import Storage
from raymq.errors import TopicNotExistError


@pytest.mark.parametrize("real", [Broker, NameServer, Pull, Rebalance, Storage])
def test_a_shell_has_the_public_methods_of_the_real_class_with_their_signatures_and_marks(real):
    made = shell(real)
    public = {name for name, _ in inspect.getmembers(real, inspect.isfunction) if not name.startswith("_")}
    assert {name for name, _ in inspect.getmembers(made, inspect.isfunction)} == public | {"__init__"}
    for name in (*public, "__init__"):
        assert inspect.signature(getattr(made, name)) == inspect.signature(getattr(real, name))
        assert getattr(made, name).__doc__ == getattr(real, name).__doc__
    assert (made.__name__, made.__doc__) == (real.__name__, real.__doc__)
    if real is Storage:
        assert made.fetch.__ray_concurrency_group__ == "fetch"


def test_a_shell_does_what_the_real_object_does_and_raises_what_it_raises():
    made = shell(RouteTable)(expiry_s=5.0)
    assert made.topics() == []
    with pytest.raises(TopicNotExistError, match="'nowhere' does not exist"):
        made.route("nowhere")


@pytest.mark.parametrize("real", [Broker, NameServer, Pull, Rebalance, Storage])
def test_a_shell_is_unpickled_where_a_users_packages_have_the_names_of_raymqs(real, tmp_path: Path):
    for name in ("actors", "storage", "placement"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user\\'s own')")
    program = "import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer).__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=cloudpickle.dumps(shell(real)),
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.stdout.decode().strip() == real.__name__, done.stderr.decode()


def test_a_server_writes_files_that_only_its_user_may_read(tmp_path):
    script = (
        "import os, sys; from actors.shell import shell; from actors.core.route_table import RouteTable;"
        "os.umask(0); shell(RouteTable)(expiry_s=5.0); open(sys.argv[1], 'w').close()"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], check=True, timeout=60)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
