"""Owns how contenders are timed against each other: in turn, in one run, answers checked. Must not know what they do."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")

_QUIET_S = 0.002
_QUIET_CPU_S = 0.0005
_QUIET_TRIES = 50


@dataclass(kw_only=True, slots=True)
class Spent:
    """What a contender took for all requests of a round."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """By all threads of this process."""


class WrongAnswerError(Exception):
    """A contender answered otherwise than the baseline, so its time means nothing."""


def alternate(
    contenders: Mapping[str, Callable[[Request], Answer]],
    draw: Callable[[int], Sequence[Request]],
    *,
    rounds: int,
    same: Callable[[Answer, Answer], bool],
    advance: Callable[[], None] = lambda: None,
    wall_clock: Callable[[], float] = time.perf_counter,
    cpu_clock: Callable[[], float] = time.process_time,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, list[Spent]]:
    """Time each contender on the same requests, ``rounds`` times over.

    Within a round the contenders take their turns request by request, so that a busy neighbour slows all of them, and
    who goes first changes with every request. A round that is not counted warms each of them up.

    Args:
        contenders: By name; the first is the baseline that the others' answers are compared with.
        draw: The requests of a round, by its number from 0 (the warm-up); every contender gets all of them. Draw new
            ones each round, or caches that no server has will flatter everybody.
        rounds: How many rounds are counted.
        same: Whether two answers are equal; called outside the timed part, on every request.
        advance: Called after each round, the warm-up included.
        wall_clock: Seconds.
        cpu_clock: Seconds of all threads.
        settle: Called before each request; ``await_quiet`` where contenders use several threads.

    Returns:
        What each counted round took, all requests together, by contender.

    Raises:
        WrongAnswerError: An answer differs from the baseline's.
    """
    names = list(contenders)
    rounds_of: dict[str, list[Spent]] = {name: [] for name in names}
    for round_number in range(rounds + 1):
        spent = {name: Spent() for name in names}
        for number, request in enumerate(draw(round_number)):
            turn = (round_number + number) % len(names)
            answers = {}
            for name in names[turn:] + names[:turn]:
                settle()
                wall_s, cpu_s = wall_clock(), cpu_clock()
                answers[name] = contenders[name](request)
                spent[name].cpu_s += cpu_clock() - cpu_s
                spent[name].wall_s += wall_clock() - wall_s
            for name in names[1:]:
                if not same(answers[names[0]], answers[name]):
                    raise WrongAnswerError(f"{name}: answers request {number} otherwise than {names[0]}")
        if round_number:
            for name in names:
                rounds_of[name].append(spent[name])
        advance()
    return rounds_of


def await_quiet() -> None:
    """Wait until no thread of this process computes, or a moment has passed.

    OpenMP's threads spin for milliseconds after a call that used them, and would be charged to the call after it.
    """
    for _ in range(_QUIET_TRIES):
        before_s = time.process_time()
        time.sleep(_QUIET_S)
        if time.process_time() - before_s < _QUIET_CPU_S:
            return
