import operator

import pytest

from benchmarks.rounds import WrongAnswerError, alternate


class Clock:
    """Seconds that pass only when a contender says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def contender(self, seconds, log, name):
        def ask(request):
            log.append((name, request))
            self.now += seconds
            return request * 2

        return ask


def test_every_contender_is_timed_on_the_same_requests_and_the_warm_up_is_not_counted():
    clock, log = Clock(), []
    contenders = {"slow": clock.contender(2.0, log, "slow"), "fast": clock.contender(0.5, log, "fast")}
    drawn = []

    def draw(round_number):
        drawn.append(round_number)
        return [10 * round_number, 10 * round_number + 1]

    seconds = alternate(contenders, draw, rounds=3, same=operator.eq, clock=clock)
    assert seconds == {"slow": [4.0, 4.0, 4.0], "fast": [1.0, 1.0, 1.0]}
    assert drawn == [0, 1, 2, 3]
    assert [request for name, request in log if name == "slow"] == [request for name, request in log if name == "fast"]


def test_who_goes_first_changes_with_every_request():
    clock, log = Clock(), []
    contenders = {name: clock.contender(1.0, log, name) for name in "abc"}
    alternate(contenders, lambda _: range(3), rounds=1, same=operator.eq, clock=clock)
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
