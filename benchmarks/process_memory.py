"""Owns the memory of processes, as Linux counts it. Must not know what they do."""

from collections.abc import Iterable, Iterator
from pathlib import Path

PROC = Path("/proc")


def descendants(pid: int) -> Iterator[int]:
    """Process ids below ``pid``, parents before their children; ``pid`` itself is left out."""
    for task in (PROC / str(pid) / "task").iterdir():
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except FileNotFoundError:  # the thread has just ended
            continue
        for child in children:
            yield child
            yield from descendants(child)


def named(pids: Iterable[int], word: str) -> Iterator[int]:
    """Those of the processes that have ``word`` in their command line."""
    for pid in pids:
        try:
            command = (PROC / str(pid) / "cmdline").read_bytes()
        except FileNotFoundError:  # it has just ended
            continue
        if word.encode() in command:
            yield pid


def pss_bytes(pid: int) -> int:
    """Proportional set size: a page that several processes map counts for each with its share of it."""
    for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss":
            return int(rest.split()[0]) * 1024
    raise AssertionError(f"the kernel states no Pss for process {pid}")


def mapped_bytes(pid: int, path: Path) -> int:
    """Bytes of a file that a process has in memory through its mappings."""
    resident, ours = 0, False
    for line in (PROC / str(pid) / "smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            ours = rest[-1:] == [str(path)]
        elif ours and first == "Rss:":
            resident += int(rest[0]) * 1024
    return resident
