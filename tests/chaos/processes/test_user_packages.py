"""Test of name conflicts: raymq runs in a user's directory that has packages with the same names as raymq's own
packages.

The directory has `storage/`, which lacks everything that raymq's `storage` has, and `actors/` and `placement.py`, which
fail when they are imported. It also has `my_listeners.py`, whose listener uses the user's `storage`. The servers must
import raymq's packages, also after a restart, and the listener must import the user's packages. The servers inherit
PYTHONPATH, which names a directory with three more packages of these names.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.support.clusters.cluster import assert_gone, assert_untouched, descendants, sandbox, user_environment

FILES = {
    "storage/__init__.py": """
        import os

        def save(path, text):
            with open(path, "a") as file:
                file.write(text + os.linesep)
    """,
    "actors/__init__.py": "raise RuntimeError('this is the user\\'s own package actors')",
    "placement.py": "raise RuntimeError('this is the user\\'s own module placement')",
    "my_listeners.py": """
        import storage

        PREFIX = "heard"

        def listen(message):
            storage.save(message.properties["journal"], f"{PREFIX} {message.body.decode()}")
    """,
    "program.py": """
        import os, signal, sys, time

        import raymq
        import my_listeners
        import storage

        journal, = sys.argv[1:]

        def message(number):
            return raymq.Message("orders", b"%d" % number, properties={"journal": journal})

        def heard():
            return len(open(journal).readlines()) if os.path.exists(journal) else 0

        def await_heard(count):
            deadline_s = time.monotonic() + 60
            while heard() < count:
                assert time.monotonic() < deadline_s, f"{heard()} of {count} heard"
                subscription.raise_listener_error()
                time.sleep(0.02)

        with raymq.connect(embedded=True) as mq:
            first = raymq.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET
            mq.admin.create_topic("orders", queues=4)
            push = mq.push_consumer("listeners", consume_from=first).subscribe("orders")
            with push.on_message(my_listeners.listen).start(instances=2) as subscription, mq.producer() as producer:
                for number in range(100):
                    producer.send_async(message(number), sharding_key=str(number))
                await_heard(100)
                # A restarted server must find raymq's storage too, not this directory's.
                os.kill(mq.storages.get("storage-broker-a-0").describe().pid, signal.SIGKILL)
                for number in range(100, 200):
                    producer.send_async(message(number), sharding_key=str(number))
                await_heard(200)
            with mq.pull_consumer("readers", consume_from=first) as consumer:
                consumer.subscribe("orders")
                seen = []
                deadline_s = time.monotonic() + 60
                while len(seen) < 200 and time.monotonic() < deadline_s:
                    seen += consumer.poll()
            assert sorted(int(one.body) for one in seen) == list(range(200))
            storage.save(journal, "the user's own storage is still the user's")
            print("look", flush=True)
            sys.stdin.readline()
        print("done")
    """,
}


def test_a_users_storage_and_actors_packages_do_not_clash_with_raymqs(tmp_path: Path) -> None:
    with sandbox() as box:
        user = tmp_path / "user"
        for name, text in FILES.items():
            (user / name).parent.mkdir(parents=True, exist_ok=True)
            (user / name).write_text(dedent(text).lstrip())
        library = tmp_path / "library"
        for package in ("actors", "placement", "storage"):
            (library / package).mkdir(parents=True)
            (library / package / "__init__.py").write_text("raise RuntimeError('of the user\\'s library')\n")
        (user / "raymq.yaml").write_text((box.work / "raymq.yaml").read_text())
        journal = tmp_path / "journal"
        program = subprocess.Popen(
            [sys.executable, "program.py", str(journal)],
            cwd=user,
            env=user_environment() | {"PYTHONPATH": str(library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with program:
            assert program.stdout is not None
            looked = program.stdout.readline()
            processes = descendants(program.pid) if looked else []
            output, errors = program.communicate("\n", timeout=120)
        assert (looked, output) == ("look\n", "done\n"), errors
        assert program.returncode == 0
        lines = journal.read_text().splitlines()
        assert lines.pop() == "the user's own storage is still the user's"
        assert {int(line.removeprefix("heard ")) for line in lines} == set(range(200))
        assert {path.name for path in user.iterdir()} - {"__pycache__"} == {name.split("/")[0] for name in FILES} | {
            "raymq.yaml"
        }
        assert len(processes) > 5
        assert_gone(processes)
        assert_untouched(box)
