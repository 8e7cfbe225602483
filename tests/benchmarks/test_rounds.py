import operator
import threading
import time

import pytest

from benchmarks.rounds import Spent, WrongAnswerError, alternate, await_quiet


class Clock:
    """Seconds that pass only when a contender says so; the CPU's at twice the wall's speed."""

    def __init__(self):
        self.now = 0.0

    def wall(self):
        return self.now

    def cpu(self):
        return 2 * self.now

    def contender(self, seconds, log, name):
        def ask(request):
            log.append((name, request))
            self.now += seconds
            return request * 2

        return ask

    def settle(self):
        self.now += 100.0


def test_every_contender_is_timed_on_the_same_requests_and_the_warm_up_is_not_counted():
    clock, log = Clock(), []
    contenders = {"slow": clock.contender(2.0, log, "slow"), "fast": clock.contender(0.5, log, "fast")}
    drawn = []

    def draw(round_number):
        drawn.append(round_number)
        return [10 * round_number, 10 * round_number + 1]

    spent = alternate(
        contenders,
        draw,
        rounds=3,
        same=operator.eq,
        wall_clock=clock.wall,
        cpu_clock=clock.cpu,
        settle=clock.settle,
    )
    assert spent == {"slow": [Spent(wall_s=4.0, cpu_s=8.0)] * 3, "fast": [Spent(wall_s=1.0, cpu_s=2.0)] * 3}
    assert drawn == [0, 1, 2, 3]
    assert [request for name, request in log if name == "slow"] == [request for name, request in log if name == "fast"]


def test_who_goes_first_changes_with_every_request():
    clock, log = Clock(), []
    contenders = {name: clock.contender(1.0, log, name) for name in "abc"}
    alternate(contenders, lambda _: range(3), rounds=1, same=operator.eq)
    first = [log[place][0] for place in range(0, len(log), 3)]
    assert first == ["a", "b", "c", "b", "c", "a"]


def test_progress_counts_the_warm_up():
    steps = []
    alternate({"a": abs}, lambda _: [1], rounds=5, same=operator.eq, advance=lambda: steps.append(1))
    assert len(steps) == 6


def test_a_wrong_answer_stops_the_measurement():
    contenders = {"right": lambda request: request, "wrong": lambda request: request + (request == 3)}
    with pytest.raises(WrongAnswerError, match="wrong: answers request 3 otherwise than right"):
        alternate(contenders, lambda _: range(5), rounds=5, same=operator.eq)


def test_quiet_comes_when_the_last_thread_stops_computing():
    stopped = threading.Event()

    def spin():
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass
        stopped.set()

    thread = threading.Thread(target=spin)
    thread.start()
    for _ in range(100):  # it gives up after a while, so on a busy machine once may not be enough
        await_quiet()
        if stopped.is_set():
            break
    thread.join()
    before_s = time.process_time()
    await_quiet()
    assert time.process_time() - before_s < 0.02
