import mmap
import os
import subprocess
import sys

import pytest

from benchmarks.process_memory import descendants, mapped_bytes, named, pss_bytes

MIB = 1 << 20
CHILD = """
import subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()", "the-inner" + "-one"], stdin=sys.stdin)
inner.wait()
"""


def test_a_file_counts_once_its_pages_are_used(tmp_path):
    path = tmp_path / "a file"
    path.write_bytes(b"x" * 4 * MIB)
    assert mapped_bytes(os.getpid(), path) == 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        for offset in range(0, 4 * MIB, mmap.PAGESIZE):
            assert mapping[offset] == ord("x")
        assert mapped_bytes(os.getpid(), path) == 4 * MIB
    assert mapped_bytes(os.getpid(), path) == 0


def test_memory_of_our_own_counts_in_full():
    before = pss_bytes(os.getpid())
    block = bytearray(b"x") * (64 * MIB)
    assert pss_bytes(os.getpid()) - before == pytest.approx(len(block), rel=0.1)


def test_descendants_are_found_over_generations_and_by_their_command_line():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"up\n"
        found = list(descendants(os.getpid()))
        assert child.pid in found
        (inner,) = named(found, "the-inner-one")
        assert found.index(inner) > found.index(child.pid)
        assert list(descendants(inner)) == []
        child.communicate(b"\n")
    assert not set(descendants(os.getpid())) & {child.pid, inner}
