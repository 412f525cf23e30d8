"""Simulates machines on this computer (tests.support.clusters.machines) with a network that tests can cut.

Each machine has one network interface, whose peer interface is in the world's network. The world's network forwards
packets between machines: 10.77.N.2 is machine N. A cut is a packet filter rule in the world's network that drops
packets from one machine to another. Each direction has its own rule. Nothing is reachable from outside.

The first machine is the head of a Ray cluster of all machines, with a token, and with health checks as in cluster.yaml.
"""

from __future__ import annotations

import json
import secrets
import select
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from raymq.common.parallel import map_parallel
from tests.support.clusters.cluster import HEALTH_CHECKS
from tests.support.clusters.machines import World, why_impossible, world

WHY_IMPOSSIBLE = why_impossible("ip")
PORT = 6379
START_S = 120.0
RAY = ("ray", "start", "--num-cpus=2", f"--object-store-memory={100 << 20}", "--disable-usage-stats")
FORWARD = "echo 1 > /proc/sys/net/ipv4/ip_forward"


class Network:
    """The machines of a simulated network, by name, with methods to run programs, cut connections and start
    Ray."""

    def __init__(self, machines: World, names: Iterable[str]) -> None:
        self._world = machines
        self._names = list(names)
        self._pids: dict[str, int] = {}
        self._cuts: set[tuple[str, str]] = set()
        token = secrets.token_hex(32)
        machines.run("sh", "-c", FORWARD, timeout_s=START_S)
        for number, name in enumerate(self._names, start=1):
            self._pids[name] = pid = machines.start_alone(name)
            # Connect the simulated machine to the shared network by a link. Its end in the machine is eth0; its other
            # end is named by the machine's number. `ip` runs in the shared network and moves eth0 to the machine's
            # network.
            subprocess.run(
                [
                    *("nsenter", "--target", str(machines.pid), "--net", "--"),
                    *("ip", "link", "add", f"to-{number}", "type", "veth", "peer", "name", "eth0", "netns", str(pid)),
                ],
                check=True,
                timeout=START_S,
            )
            self._outside("addr", "add", f"10.77.{number}.1/24", "dev", f"to-{number}")
            self._outside("link", "set", f"to-{number}", "up")
            self.run(name, "ip", "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self.run(name, "ip", "link", "set", "eth0", "up")
            self.run(name, "ip", "route", "add", "default", "via", f"10.77.{number}.1")
            directory = machines.root(name) / ".ray"
            directory.mkdir()
            (directory / "auth_token").write_text(token)

    def _outside(self, *command: str) -> None:
        self._world.run("ip", *command, timeout_s=START_S)

    def address(self, name: str) -> str:
        return f"10.77.{self._names.index(name) + 1}.2"

    def root(self, name: str) -> Path:
        """Return a machine's home directory."""
        return self._world.root(name)

    def run(self, name: str, *command: str) -> str:
        """Run a command on a machine. Returns its output."""
        return self._world.run(*command, timeout_s=START_S, machine=self._pids[name])

    def spawn(self, name: str, *command: str, **streams: IO[bytes] | int) -> subprocess.Popen[bytes]:
        """Start a program on a machine."""
        address = f"RAY_ADDRESS={self.address(self._names[0])}:{PORT}"
        called = self._world.command(["env", address, *command], self._pids[name])
        return subprocess.Popen(called, **{"stdin": subprocess.DEVNULL, **streams})  # type: ignore[call-overload,no-any-return]

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a program that `spawn` started. Returns after the program has ended.

        `process`: the process that `spawn` returned, which is the parent of the program.
        """
        if process.poll() is None:
            programs = psutil.Process(process.pid).children(recursive=True)
            for program in programs:
                program.kill()
            psutil.wait_procs(programs, timeout=30)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        process.wait(30)

    def start_ray(self) -> None:
        """Start Ray on all machines, with the first machine as head."""
        head, *others = self._names
        system_config = json.dumps(HEALTH_CHECKS)
        self._ray(head, "--head", f"--port={PORT}", "--include-dashboard=false", f"--system-config={system_config}")
        self._start_workers(others)

    def join(self, *names: str) -> None:
        """Start Ray on machines that are not the head. First ends old Ray processes on the machines, as `ray up`
        does."""
        _at_once(lambda name: self.run(name, "ray", "stop", "--force"), names)
        self._start_workers(names)

    def _start_workers(self, names: Sequence[str]) -> None:
        address = f"--address={self.address(self._names[0])}:{PORT}"
        _at_once(lambda name: self._ray(name, address), names)

    def _ray(self, name: str, *options: str) -> None:
        # Write the output of `ray start` to a file. Ray's agents keep the command's output streams open, so reading the
        # streams to their end would never return.
        command = " ".join(f"'{word}'" for word in (*RAY, f"--node-ip-address={self.address(name)}", *options))
        log = f"{self.root(name).parent}/ray.log"
        self.run(name, "env", "RAY_AUTH_MODE=token", "sh", "-c", f"{command} > {log} 2>&1 || {{ cat {log}; exit 1; }}")

    def cut(self, source: Iterable[str], target: Iterable[str]) -> None:
        """Drop all packets from the `source` machines to the `target` machines until `heal`. Packets in the other
        direction still pass."""
        for one in source:
            for other in target:
                self._rule("add", one, other)
                self._cuts.add((one, other))

    def heal(self) -> None:
        """Remove all cuts from the network, so that all machines can reach each other again."""
        for one, other in self._cuts:
            self._rule("del", one, other)
        self._cuts.clear()

    def _rule(self, verb: str, source: str, target: str) -> None:
        self._outside("rule", verb, "from", self.address(source), "to", self.address(target), "blackhole")


def _at_once(action: Callable[[str], object], names: Sequence[str]) -> None:
    """Call `action` for all machines at the same time, and wait for all calls. Raises the error of the first machine
    whose call failed."""
    map_parallel(action, names, threads_max=len(names), name="machines")


@contextmanager
def network(directory: Path, names: Iterable[str]) -> Iterator[Network]:
    """Yield a network of machines without Ray. At the end all processes of the machines are killed."""
    with world(directory, keys=False) as machines:
        yield Network(machines, names)


class Hand:
    """The test's control of a program (tests/chaos/nodes/remote_group.py) that runs on another machine and executes the
    test's requests there."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ask(self, question: str, *arguments: object, timeout_s: float = 120.0) -> Any:
        """Send a request to the program and return its answer. Raises AssertionError with the program's error if the
        request failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([question, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        assert readable, f"no answer to {question} within {timeout_s:g} s"
        line = self._process.stdout.readline()
        assert line, f"the hand has ended with {self._process.wait(10)}"
        answer = json.loads(line)
        assert "error" not in answer, f"{question}: {answer['error']}"
        return answer["answer"]
