"""Threads and allocator of a shard process."""

import os

import pytest

from model_repo.process import shard_threads


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({"KJTSERVE_SHARD_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"KJTSERVE_SHARD_THREADS": "", "OMP_NUM_THREADS": "5"}, 5),
    ],
)
def test_threads_follow_the_environment(environ, threads):
    assert shard_threads(environ) == threads


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5"])
def test_a_thread_count_that_is_no_positive_number_is_refused(text):
    with pytest.raises(ValueError, match="KJTSERVE_SHARD_THREADS"):
        shard_threads({"KJTSERVE_SHARD_THREADS": text})


@pytest.mark.parametrize(
    ("files", "cap"),
    [
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_without_environment_threads_are_the_cpus_within_the_quota(tmp_path, files, cap):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    cpus = len(os.sched_getaffinity(0))
    assert shard_threads({}, cgroup=tmp_path) == (cpus if cap is None else min(cap, cpus))
