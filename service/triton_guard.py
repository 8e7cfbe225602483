"""Owns the process between ``kjtserve serve`` and its Triton: whatever happens to the one, nothing of the other is left.

Run as a script by ``service.triton``, in an isolated interpreter: standard library only, and no import of ours.
Its standard input is a pipe that the front tier holds open. When something is written there, or it closes because the
front tier was killed, Triton gets SIGTERM, its time, then SIGKILL, its model processes with it. When Triton ends first,
what is left of it is removed and its exit code passed on.

Triton's shared memory regions carry a prefix of their own for every start. A lock on a file of that prefix is held as
long as the guard lives, so that a later guard can tell the regions of dead servers (a ``kill -9`` of everything) from
those of living ones, in other containers too.
"""

import argparse
import ctypes
import fcntl
import glob
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108 - where Triton keeps the tensors that its processes exchange
PREFIX_START = "kjtserve_"
LOCK_SUFFIX = "lock"

_LOCK_NAME = re.compile(rf"{PREFIX_START}[0-9a-f]{{12}}_{LOCK_SUFFIX}")
"""Anybody may put a file there, and its name says what is removed."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def main(argv: list[str]) -> int:
    """Guard one Triton; the exit code is Triton's, or 128 + the signal that ended it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shm-prefix", required=True)
    parser.add_argument("--grace-s", type=float, required=True)
    parser.add_argument("--remove", type=Path, help="directory to remove if the front tier was killed")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)

    remove_dead_regions()
    lock = claim_prefix(options.shm_prefix)
    try:
        code, orphaned = guard(options.command, options.grace_s)
    finally:
        remove_regions(options.shm_prefix)
        os.close(lock)
    if orphaned and options.remove is not None:
        shutil.rmtree(options.remove, ignore_errors=True)
    return code


def guard(command: list[str], grace_s: float) -> tuple[int, bool]:
    """Run ``command`` until it ends or standard input has something; then end its whole process group.

    Returns:
        The exit code, and whether standard input was closed without a word.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # model processes that lose their server become ours to wait for
    # The preexec function is safe here: this process has one thread.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent)  # noqa: S603, PLW1509
    orphaned = False
    while not _ended(child.pid):
        word = _read_stdin(_POLL_S)
        if word is not None:
            orphaned = word == b""
            _end(child.pid, grace_s)
            break
    # The model processes are in its group, which keeps its number as long as the zombie is not reaped.
    os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    _reap_orphans()
    return (128 - code if code < 0 else code), orphaned


def claim_prefix(prefix: str, shm: Path = SHM) -> int:
    """Hold the lock that says that ``prefix`` is in use; returns its file descriptor."""
    unfinished = shm / f"{prefix}{LOCK_SUFFIX}.new"
    lock = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unfinished.rename(shm / f"{prefix}{LOCK_SUFFIX}")  # nobody sees it before it is locked
    return lock


def remove_dead_regions(shm: Path = SHM) -> None:
    """Remove the shared memory of servers that ended without anybody to clean up after them."""
    for path in shm.glob(f"{PREFIX_START}*_{LOCK_SUFFIX}"):
        if not _LOCK_NAME.fullmatch(path.name):
            continue
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:  # removed by another guard, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_regions(path.name.removesuffix(LOCK_SUFFIX), shm)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def remove_regions(prefix: str, shm: Path = SHM) -> None:
    """Remove every file of a prefix, its lock last."""
    lock = shm / f"{prefix}{LOCK_SUFFIX}"
    for path in shm.glob(f"{glob.escape(prefix)}*"):
        if path != lock:
            path.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap_orphans() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


def _ended(pid: int) -> bool:
    """Whether the child has ended; it stays a zombie."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _read_stdin(wait_s: float) -> bytes | None:
    """What the front tier wrote, empty if it is gone; None if there is nothing yet."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], wait_s)
    return os.read(sys.stdin.fileno(), 1) if readable else None


def _end(pid: int, grace_s: float) -> None:
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while not _ended(pid) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
