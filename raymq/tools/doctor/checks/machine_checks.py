"""Checks of single machines: the machine on which the command runs, and every node of the Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from raymq.tools.doctor.facts import DirectoryFacts, DoctorSnapshot, MachineFacts
from raymq.tools.doctor.findings import HERE, Check, Finding, State, fail, finding, ok, warn

SOCKET_PATH_MAX: Final = 107
"""Maximum length in bytes of the path of a Unix socket."""
FILES_FEW: Final = 8192
FILES_TOO_FEW: Final = 1024
SHM_SMALL_BYTES: Final = 512 << 20
FLUSH_SLOW_MS: Final = 20.0
PYTHONS: Final = ("3.11", "3.12", "3.13")
"""The versions of Python on which raymq is tested."""
JAVA_OLD_DAYS: Final = 3 * 365
"""The age in days from which a Java runtime lacks many security fixes."""
JAVA_DO: Final = "install a current Java 17 (apt install openjdk-17-jre-headless), then `raymq down` and `raymq up`"
TOKEN_DO: Final = "`raymq doctor --fix`, or chmod 600 it: a user who reads it can run code in the cluster"

_VANISHING: Final = frozenset(("tmpfs", "ramfs", "devtmpfs"))
_NETWORK: Final = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "gluster", "lustre", "afs", "virtiofs")

MachineJudge = Callable[[MachineFacts], Iterable[Finding]]
DirectoryJudge = Callable[[DirectoryFacts], Finding]


def _everywhere(judge: MachineJudge) -> Callable[[DoctorSnapshot], list[Finding]]:
    """Return a check function of the doctor. It applies the function `judge` to the facts about this machine, and to
    the facts about each node that answered."""

    def judge_all(snapshot: DoctorSnapshot) -> list[Finding]:
        machines = [(snapshot.machine, HERE), *((node.machine, node.ip) for node in snapshot.nodes if node.machine)]
        return [replace(result, where=where) for machine, where in machines for result in judge(machine)]

    return judge_all


def _each_directory(judge: DirectoryJudge) -> Callable[[DoctorSnapshot], list[Finding]]:
    """Return a check that applies the function `judge` to every readable store directory. Another check,
    `directories_seen`, reports unreadable directories."""

    return _everywhere(lambda machine: [judge(one) for one in machine.directories if not one.error])


def versions(machine: MachineFacts) -> Iterable[Finding]:
    """Check the versions of Python, Ray and raymq."""
    seen = f"Python {machine.python}, Ray {machine.ray}, raymq {machine.raymq}"
    if machine.python.rpartition(".")[0] not in PYTHONS:
        yield fail(seen, f"install raymq for Python {', '.join(PYTHONS[:-1])} or {PYTHONS[-1]}")
    elif machine.raymq == "not installed":
        yield warn(seen, "pip install raymq: other programs do not find a folder on the import path")
    else:
        yield ok(seen)


def import_path(machine: MachineFacts) -> Iterable[Finding]:
    """Check that the Python import path contains exactly one raymq, and that it includes the server packages."""
    several = {name: folders for name, folders in machine.copies.items() if len(folders) > 1}
    if machine.floors_missing:
        yield fail(f"raymq lacks {', '.join(machine.floors_missing)}", "install raymq again: this one is broken")
    elif several:
        seen = "; ".join(f"{name} is in {' and in '.join(folders)}" for name, folders in several.items())
        yield warn(seen, "remove one: the first one wins, which depends on the current directory")
    else:
        yield ok("one raymq, with its server packages")


def java(machine: MachineFacts) -> Iterable[Finding]:
    """Check that Spark, if it is installed, finds a Java that it supports, and name that Java's version and age."""
    if not machine.spark:
        yield ok("not needed: the extra spark is not installed")
    elif not machine.java_version:
        yield warn(f"no Java, but Spark needs {machine.java_need}", JAVA_DO)
    elif machine.java_problem:
        seen = f"Java {machine.java_version} in {machine.java_home} {machine.java_problem}"
        yield warn(f"{seen}: Spark needs {machine.java_need}", JAVA_DO)
    else:
        days = machine.java_age_days
        age = "of unknown age" if days is None else f"released {machine.java_released}, {days:,} days ago"
        seen = f"Java {machine.java_version}, {age}, in {machine.java_home}"
        yield ok(seen) if days is None or days < JAVA_OLD_DAYS else warn(seen, JAVA_DO)


def token(machine: MachineFacts) -> Iterable[Finding]:
    """Check that the file that contains Ray's token can be read by the file's owner only."""
    if machine.token_mode is None:
        if machine.token_digest:
            yield ok("the token is in RAY_AUTH_TOKEN")
        elif machine.auth_mode == "token":
            yield fail(f"RAY_AUTH_MODE is token, and {machine.token_path} does not exist", "copy the cluster's token")
        else:
            yield warn(
                f"no token in {machine.token_path}: Ray accepts calls without a token",
                "`raymq up` creates one; without it everybody who reaches Ray's ports can run code in the cluster",
            )
    elif machine.token_mode & 0o077:
        yield fail(f"{machine.token_path} has mode {machine.token_mode:04o}", TOKEN_DO)
    else:
        yield ok(f"{machine.token_path}, mode {machine.token_mode:04o}")


def free_port(machine: MachineFacts) -> Iterable[Finding]:
    """Check that a network port can be opened. Ray and raymq's direct socket connections (lanes) need free
    ports."""
    if machine.port_error:
        yield fail(machine.port_error, "look for programs that hold many ports (ss -s), and for limits of the system")
    else:
        yield ok("a port can be opened")


def open_files(machine: MachineFacts) -> Iterable[Finding]:
    """Check that the limit of open files is high enough for logs, queues and connections."""
    seen = f"{machine.files_soft:,} open files, at most {machine.files_hard:,}"
    do = f"ulimit -n {max(65_536, FILES_FEW):d} before `raymq up`, or LimitNOFILE= in the service"
    if machine.files_soft < FILES_TOO_FEW:
        yield fail(seen, do)
    elif machine.files_soft < FILES_FEW:
        yield warn(seen, do)
    else:
        yield ok(seen)


def shared_memory(machine: MachineFacts) -> Iterable[Finding]:
    """Check that /dev/shm has enough space for Ray's object store."""
    if machine.shm_bytes is None:
        yield warn("no /dev/shm", "mount a tmpfs there: Ray's object store is slow without it")
    elif machine.shm_bytes < SHM_SMALL_BYTES:
        yield warn(
            f"/dev/shm has {machine.shm_bytes >> 20} MiB",
            "docker run --shm-size=2g, or a larger emptyDir: Ray's object store falls back to the disk",
        )
    else:
        yield ok(f"/dev/shm has {machine.shm_bytes >> 20:,} MiB")


def path_lengths(machine: MachineFacts) -> Iterable[Finding]:
    """Check that the paths of Ray's sockets are not longer than the kernel allows."""
    seen = f"sockets have paths of {machine.socket_path_bytes} of {SOCKET_PATH_MAX} bytes"
    if machine.socket_path_bytes > SOCKET_PATH_MAX:
        yield fail(f"{seen}: {machine.socket_path}", "RAY_TMPDIR=/tmp, or another short path, before `raymq up`")
    else:
        yield ok(seen)


def directories_seen(machine: MachineFacts) -> Iterable[Finding]:
    """Check that the store directories can be read and written."""
    for one in machine.directories:
        if one.error:
            do = "choose another directory (data_dir), or let the user of Ray's processes read and write there"
            yield fail(f"{one.path}: {one.error}", do)
        elif one.exists and one.uid not in (one.owner_uid, 0):
            yield fail(
                f"{one.path} belongs to user {one.owner_uid}, this is user {one.uid}",
                "chown it, or run as its owner",
            )
        elif not one.writable:
            yield fail(f"{one.existing_path} is not writable", "chown or chmod it, or choose another data_dir")
        elif not one.exists:
            yield ok(f"{one.path} does not exist yet; it can be created")
        else:
            yield ok(one.path)


def file_system(one: DirectoryFacts) -> Finding:
    """Check that stores are on a local disk, not on a network file system."""
    seen = f"{one.path} is on {one.file_system or 'an unknown file system'}"
    if one.file_system in _VANISHING:
        return warn(seen, "use a disk: this is memory, which loses its messages at the next start")
    if one.file_system == "overlay":
        return warn(seen, "mount a volume: this is the container's layer, which is deleted with the container")
    if one.file_system.startswith(_NETWORK):
        return warn(seen, "use a disk of the machine: locks and flushes over a network are slow or missing")
    return ok(seen)


def free_space(one: DirectoryFacts) -> Finding:
    """Check that the disk is not so full that a store deletes messages early or refuses new messages."""
    seen = f"{one.path}: {one.used_ratio:.0%} used, {one.free_bytes >> 20:,} MiB free"
    if one.used_ratio > one.refuse_ratio:
        return fail(f"{seen}; over {one.refuse_ratio:.0%} the store refuses messages", "make room, now")
    if one.used_ratio > one.max_used_ratio:
        limit = f"over {one.max_used_ratio:.0%} (disk_max_used_space_ratio) old messages are deleted at any hour"
        return warn(f"{seen}; {limit}", "make room, use a larger disk, or shorten file_reserved_time_hours")
    return ok(seen)


def private_files(one: DirectoryFacts) -> Finding:
    """Check that only the owner of the store's files may read the messages."""
    if not one.exists:
        return ok(f"{one.path} does not exist yet")
    if one.readable_count:
        first = ", ".join(one.readable)
        return fail(
            f"other users may use {one.readable_count:,} files and directories: {first}",
            "`raymq doctor --fix`, or chmod -R go= it: they hold the messages",
        )
    return ok(f"only user {one.owner_uid} may read {one.path}")


def fiemap(one: DirectoryFacts) -> Finding:
    """Check that the file system reports which blocks were written (FIEMAP). Without FIEMAP, recovery must read whole
    files."""
    if one.fiemap is None:
        return finding(State.SKIP, f"{one.existing_path} is not writable, so this was not tested")
    if not one.fiemap:
        seen = f"{one.file_system} under {one.path} does not report written blocks (FIEMAP)"
        return warn(seen, "use ext4 or XFS: after a kill, a store on this one reads more of its log before it opens")
    return ok("the file system reports written blocks (FIEMAP)")


def flush_time(one: DirectoryFacts) -> Finding:
    """Check that flushing a few bytes to disk is fast. With SYNC_FLUSH each acknowledgement waits for a flush."""
    if not one.fdatasync_ms:
        return finding(State.SKIP, f"{one.existing_path} is not writable, so this was not tested")
    times = one.fdatasync_ms
    p50, p99 = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
    seen = f"{len(times)} flushes of 4 KiB: p50 {p50:.1f} ms, p99 {p99:.1f} ms"
    if p99 > FLUSH_SLOW_MS:
        return warn(f"{one.path}: {seen}", "use a separate disk for the log, or flush_disk_type: ASYNC_FLUSH")
    return ok(seen)


def locks(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that no process outside of this cluster holds a store's lock."""
    stores = snapshot.cluster.status.stores if snapshot.cluster else ()
    known = {store.pid for store in stores if not store.error}
    found = []
    for directory in snapshot.machine.directories:
        strangers = {name: pid for name, pid in directory.locks.items() if pid not in known}
        if strangers and not snapshot.cluster:
            named = ", ".join(f"{name} (pid {pid})" for name, pid in sorted(strangers.items()))
            found.append(
                warn(
                    f"{directory.path}: a process holds stores, but no raymq was found: {named}",
                    "another Ray cluster uses them (--address), or an old process still runs: `raymq up` will fail",
                    HERE,
                )
            )
        else:
            found.append(ok(f"{directory.path}: {len(directory.locks)} stores are open", HERE))
    return found


def ray_cluster(snapshot: DoctorSnapshot) -> list[Finding]:
    """Check that the Ray cluster at the given address runs. Without an address, no Ray cluster is required."""
    if not snapshot.ray_error:
        return [ok(f"{len(snapshot.nodes)} nodes" if snapshot.nodes else "reached", HERE)]
    seen, _, advice = snapshot.ray_error.partition(": ")
    if snapshot.named:
        return [fail(seen, advice or "check the address, and Ray's token", HERE)]
    return [ok(f"{seen}; no address was given", HERE)]


MACHINE_CHECKS: Final = (
    Check("versions", "machine", _everywhere(versions)),
    Check("import path", "machine", _everywhere(import_path)),
    Check("Java", "machine", _everywhere(java)),
    Check("token", "machine", _everywhere(token)),
    Check("ports", "machine", _everywhere(free_port)),
    Check("open files", "machine", _everywhere(open_files)),
    Check("shared memory", "machine", _everywhere(shared_memory)),
    Check("socket paths", "machine", _everywhere(path_lengths)),
    Check("data directory", "machine", _everywhere(directories_seen)),
    Check("file system", "machine", _each_directory(file_system)),
    Check("disk space", "machine", _each_directory(free_space)),
    Check("private files", "machine", _each_directory(private_files)),
    Check("written blocks", "machine", _each_directory(fiemap)),
    Check("flush time", "machine", _each_directory(flush_time)),
    Check("locks", "machine", locks),
    Check("Ray cluster", "machine", ray_cluster),
)
