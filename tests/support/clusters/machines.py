"""Simulates machines on this computer with Linux namespaces.

A world is a set of machines. A world's network has only a loopback interface, so nothing is reachable from outside.
Each machine has its own processes, /root, /tmp, /run and /dev/shm, and shares the rest of the file system with this
computer. A machine with log-in runs an sshd and shares the world's network, in which port 22 of every loopback address
is free. A machine without log-in has a network of its own, which tests.support.clusters.network connects to the world's
network. The world's first process ends together with the test's process, and ends all other processes of the world.

    DIRECTORY/key, key.pub, host_key    the user's keys and the machines' host key
    DIRECTORY/NAME/root, tmp            a machine's /root and /tmp
    DIRECTORY/NAME/log                  the output of a machine's first process
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.clusters.cluster import title
from tests.support.history.waiting import eventually

SSHD = "/usr/sbin/sshd"
START_TIMEOUT_S = 60.0
OPERATOR = "operator"
SEARCH_PATH = f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SCRIPT = Path(__file__).with_name("machine.sh")
REPOSITORY = Path(__file__).parents[3]

# A Python program that does what `ip link set lo up` does, because the `ip` command is not installed everywhere.
LOOPBACK_UP = """
import fcntl, socket, struct, time
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))
while True:
    time.sleep(3600)
"""

SSHD_CONFIG = """\
ListenAddress {address}:22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/key.pub
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
"""


def why_impossible(*programs: str) -> str:
    """Return why this computer cannot run simulated machines with these programs; empty if it can run them."""
    if os.geteuid() != 0:
        return "only root may make namespaces"
    for program in ("unshare", "nsenter", "setpriv", *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed (Debian: util-linux, iproute2, openssh-client, openssh-server, rsync)"
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/run"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return f"no namespaces here: {trial.stderr.strip()}" if trial.returncode else ""


@dataclass(frozen=True, slots=True)
class World:
    """A set of simulated machines and the operator's machine, from which a test logs in to the simulated
    machines."""

    directory: Path
    process: subprocess.Popen[bytes]
    machines: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def key(self) -> Path:
        """Path of the private ssh key that every simulated machine accepts."""
        return self.directory / "key"

    def root(self, name: str) -> Path:
        """Return the directory that a simulated machine sees as /root, the home directory of its user."""
        return self.directory / name / "root"

    @property
    def pid(self) -> int:
        """The process id of the first process in the Linux namespace in which all simulated machines run."""
        return _first_process(self.process)

    def run(self, *command: str, timeout_s: float, machine: int | None = None) -> str:
        """Run a command in the repository's directory and return its output.

        `machine`: the id of a machine's first process; the command runs on that machine. Without `machine` the command
        runs as the operator. Raises AssertionError with the output if the command fails.
        """
        done = subprocess.run(
            self.command(command, machine),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def command(self, command: Sequence[str], machine: int | None = None) -> list[str]:
        """Return the command line that runs a command on a machine, or as the operator if `machine` is None. `machine`:
        the process id of the machine's first process."""
        return [*_enter(machine or self.pid, mount=True), *_inside(REPOSITORY), *command]

    def start(self, name: str, address: str) -> None:
        """Start a machine with log-in at a loopback address. Returns as soon as the machine's sshd listens."""
        _furnish(self.directory / name)
        home = self.root(name)
        # The programs on this simulated machine import raymq from this repository, not an installed version.
        (home / ".bashrc").write_text(f"export PYTHONPATH={REPOSITORY}\n")
        config = home.parent / "sshd_config"
        config.write_text(SSHD_CONFIG.format(address=address, directory=self.directory))
        machine, log = self._begin(name, SSHD, "-D", "-e", "-f", str(config))

        def listens() -> bool:
            assert machine.poll() is None, log.read_text()
            return "Server listening" in log.read_text()

        eventually(listens, f"the sshd of {name}", 20)

    def start_alone(self, name: str) -> int:
        """Start a machine that has its own network. Returns the process id of the machine's first process."""
        _furnish(self.directory / name)
        machine, log = self._begin(name, sys.executable, "-c", LOOPBACK_UP, net=True)

        def runs() -> int:
            assert machine.poll() is None, log.read_text()
            return _first_process(machine)

        return eventually(runs, f"the first process of {name}", 20)

    def _begin(self, name: str, *command: str, net: bool = False) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.directory / name / "log"
        with log.open("wb") as output:
            machine = subprocess.Popen(
                [
                    *_enter(self.pid, mount=False),
                    *_machine(self.directory / name, self.directory, net=net),
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.machines.append(machine)
        return machine, log


@contextmanager
def world(directory: Path, *, keys: bool = True) -> Iterator[World]:
    """Yield a world: a simulated network, at first without machines. At the end all processes of the world are killed.
    `keys`: True to make ssh keys for log-ins."""
    directory = directory.resolve()
    for name in ("key", "host_key") if keys else ():
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    _furnish(directory / OPERATOR)
    command = [*_machine(directory / OPERATOR, directory, net=True), sys.executable, "-c", LOOPBACK_UP]
    process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL)
    made = World(directory, process)
    try:
        eventually(lambda: _first_process(process) != 0, "the world's first process", START_TIMEOUT_S)
        yield made
    finally:
        started = [process, *made.machines]
        family = [child for one in started for child in psutil.Process(one.pid).children(recursive=True)]
        process.kill()  # if the world's first process ends, the kernel ends every other process in its namespaces
        for one in started:
            one.wait(30)
        _, alive = psutil.wait_procs(family, timeout=30)
        assert alive == []


def _furnish(directory: Path) -> None:
    for part in ("root", "tmp"):
        (directory / part).mkdir(parents=True)
    (directory / "tmp").chmod(0o1777)


def _machine(directory: Path, world_directory: Path, *, net: bool = False) -> list[str]:
    kept = {Path(path).resolve() for path in (REPOSITORY, sys.prefix, sys.base_prefix, world_directory)}
    return [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *(["--net"] if net else [])),
        *("sh", str(SCRIPT), str(directory), "\n".join(map(str, sorted(kept)))),
    ]


def _enter(pid: int, *, mount: bool) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--pid", *(["--mount"] if mount else []), "--"]


def _inside(directory: Path) -> list[str]:
    """Return a command prefix that runs a command with a clean environment, as after a log-in."""
    return [
        *("env", "-i", f"--chdir={directory}", "HOME=/root", "USER=root", f"PATH={SEARCH_PATH}", "LANG=C.UTF-8"),
        *("RAY_USAGE_STATS_ENABLED=0", "RAY_UP_enable_autoscaler_v2=1"),
    ]


def _first_process(unshare: subprocess.Popen[bytes]) -> int:
    """Return the id of the child process of `unshare`, or 0 while the child does not yet run its program."""
    for child in psutil.Process(unshare.pid).children(recursive=True):
        if title(child) == sys.executable:
            return child.pid
    return 0
