"""Tests of how Ray and other programs use raymq's actor classes."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import cloudpickle
import pytest

from actors.actor_class import actor_class, remote_function
from actors.broker.actor import Broker
from actors.core.nameserver.route_table import RouteTable
from actors.nameserver import NameServer
from actors.pull.actor import Pull
from actors.rebalance import Rebalance
from actors.replica.storage_actor import Storage
from placement import inventory
from placement.replica_nodes import Node
from raymq.common.errors import TopicNotExistError

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("real", [Broker, NameServer, Pull, Rebalance, Storage])
def test_an_actor_class_has_the_public_methods_of_the_real_class_with_their_signatures_and_marks(real):
    made = actor_class(real)
    public = {name for name, _ in inspect.getmembers(real, inspect.isfunction) if not name.startswith("_")}
    signed = {f"signed_{name}" for name in public}
    assert {name for name, _ in inspect.getmembers(made, inspect.isfunction)} == public | signed | {
        "__init__",
        "__new__",
    }
    for name in public:
        assert inspect.signature(getattr(made, name)) == inspect.signature(getattr(real, name))
        twin = getattr(made, f"signed_{name}")
        assert marks(twin) == marks(getattr(made, name)) == marks(getattr(real, name))
    for name in (*public, "__init__"):
        assert getattr(made, name).__doc__ == getattr(real, name).__doc__
    parameters = inspect.signature(made.__init__).parameters
    assert [parameters[name] for name in parameters if name != "access"] == [
        *inspect.signature(real.__init__).parameters.values()
    ]
    assert (made.__name__, made.__doc__) == (real.__name__, real.__doc__)
    if real is Storage:
        assert made.fetch.__ray_concurrency_group__ == "fetch"


def marks(method):
    """Return the options that are set on an actor's method for Ray, such as its concurrency group and its number of
    return values."""
    return {name: value for name, value in vars(method).items() if name.startswith("__ray_")}


def test_a_constructor_has_no_argument_of_the_name_of_the_stand_ins():
    class Server:
        def __init__(self, access):
            self.access = access

    with pytest.raises(TypeError, match="not have a parameter named access"):
        actor_class(Server)


def test_where_access_is_off_a_signed_call_is_as_good_as_a_plain_one():
    made = actor_class(RouteTable)(expiry_s=5.0)
    assert made.signed_topics(None, pickle.dumps(((), {}))) == made.topics() == []


def test_an_actor_class_returns_and_raises_like_the_real_object():
    made = actor_class(RouteTable)(expiry_s=5.0)
    assert made.topics() == []
    with pytest.raises(TopicNotExistError, match="'nowhere' does not exist"):
        made.route("nowhere")


@pytest.mark.parametrize("real", [Broker, NameServer, Pull, Rebalance, Storage])
def test_an_actor_class_is_unpickled_where_a_users_packages_have_the_names_of_raymqs(real, tmp_path: Path):
    program = "import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer).__name__)"
    assert beside_a_users_packages(tmp_path, program, cloudpickle.dumps(actor_class(real))) == real.__name__


def test_where_an_actor_is_made_its_arguments_may_be_of_the_floors(tmp_path: Path):
    """An actor's arguments may be of classes in the server packages. Ray first creates the actor object, which makes
    these classes importable, then unpickles the arguments, and then calls `__init__`."""
    program = """
        import sys, cloudpickle, pickle
        made = cloudpickle.load(sys.stdin.buffer)
        actor = made.__new__(made)
        node = pickle.load(sys.stdin.buffer)
        actor.__init__(expiry_s=5.0)
        print(node.ip, actor.topics())
    """
    pickled = cloudpickle.dumps(actor_class(RouteTable)) + pickle.dumps(Node("id", "10.0.0.7"))
    assert beside_a_users_packages(tmp_path, program, pickled) == "10.0.0.7 []"


def test_a_remote_function_runs_where_a_users_packages_have_the_names_of_raymqs(tmp_path: Path):
    (tmp_path / "broker-a-0" / "commitlog").mkdir(parents=True)
    stores_below = remote_function(inventory._list_stores)
    assert stores_below.__name__ == "_list_stores"
    program = "import sys, cloudpickle; print(cloudpickle.load(sys.stdin.buffer)(sys.argv[1]))"
    assert beside_a_users_packages(tmp_path, program, cloudpickle.dumps(stores_below)) == "({'broker-a-0': 0}, {})"


def beside_a_users_packages(directory: Path, program: str, pickled: bytes) -> str:
    """Run a program in a directory in which the user has packages with the names of the server packages. Returns the
    program's output."""
    for name in ("actors", "storage", "placement"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text("raise RuntimeError('the user\\'s own')")
    done = subprocess.run(
        [sys.executable, "-c", dedent(program), str(directory)],
        input=pickled,
        cwd=directory,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_a_server_writes_files_that_only_its_user_may_read(tmp_path):
    script = (
        "import os, sys; from actors.actor_class import actor_class;"
        "from actors.core.nameserver.route_table import RouteTable;"
        "os.umask(0); actor_class(RouteTable)(expiry_s=5.0); open(sys.argv[1], 'w').close()"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "file")], cwd=ROOT, check=True, timeout=60)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
