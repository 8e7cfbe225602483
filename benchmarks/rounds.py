"""Owns how contenders are timed against each other: in turn, in one run, answers checked. Must not know what they do."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class WrongAnswerError(Exception):
    """A contender answered otherwise than the baseline, so its time means nothing."""


def alternate(
    contenders: Mapping[str, Callable[[Request], Answer]],
    draw: Callable[[int], Sequence[Request]],
    *,
    rounds: int,
    same: Callable[[Answer, Answer], bool],
    advance: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
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
        clock: Seconds.

    Returns:
        Seconds of each counted round, all requests together, by contender.

    Raises:
        WrongAnswerError: An answer differs from the baseline's.
    """
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(rounds + 1):
        spent = dict.fromkeys(names, 0.0)
        for number, request in enumerate(draw(round_number)):
            turn = (round_number + number) % len(names)
            answers = {}
            for name in names[turn:] + names[:turn]:
                start = clock()
                answers[name] = contenders[name](request)
                spent[name] += clock() - start
            for name in names[1:]:
                if not same(answers[names[0]], answers[name]):
                    raise WrongAnswerError(f"{name}: answers request {number} otherwise than {names[0]}")
        if round_number:
            for name in names:
                seconds[name].append(spent[name])
        advance()
    return seconds
