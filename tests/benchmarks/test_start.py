import pytest

from benchmarks import start

ROWS = 3000


def test_memory_limit_is_five_per_cent_over_the_state_and_500_mb():
    assert start.pss_limit_bytes(2_208_000_000) == 2_818_400_000


@pytest.mark.e2e
def test_run_starts_a_real_shard_and_measures_every_round(monkeypatch):
    monkeypatch.setattr(start, "DIM", 8)
    told = []
    seconds, memory = start.run(ROWS, rounds=2, on_progress=lambda *step: told.append(step))
    assert len(seconds.rounds) == 2
    assert 0.5 < seconds.value < 120
    assert seconds.target is None, "the target is for the whole table"
    assert "1333 times smaller" in seconds.setting
    assert 100 < memory.value < 1000
    assert memory.target == 500 + round(1.05 * memory_state(memory))
    steps = [step for step, done, total in told if done == total]
    assert steps.index("building the table") < steps.index("starting the shard") < steps.index("asking for every id")


def memory_state(memory):
    return float(memory.subject.removeprefix("its processes, a state of ").removesuffix(" MB"))
