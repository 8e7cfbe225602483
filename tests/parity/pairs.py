"""Generated combinations: all of them, what TorchRec refuses left out by rule, and a covering set of the rest."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Choice = dict[str, Any]
"""One value for every dimension."""

Rule = Callable[[Choice], str | None]
"""Why TorchRec refuses a choice; None: it does not."""


def accepted(dimensions: Mapping[str, Sequence[Any]], rule: Rule) -> list[Choice]:
    """Every choice that the rule lets pass, in the order of the product."""
    product = (dict(zip(dimensions, values, strict=True)) for values in itertools.product(*dimensions.values()))
    return [choice for choice in product if rule(choice) is None]


def pairs_of(choice: Choice) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Every two of its values, with the names of their dimensions."""
    return set(itertools.combinations(choice.items(), 2))


def cover(dimensions: Mapping[str, Sequence[Any]], rule: Rule) -> list[Choice]:
    """Few choices that hold every pair of values which any accepted choice holds: greedily the one with most new pairs."""
    candidates = [(choice, pairs_of(choice)) for choice in accepted(dimensions, rule)]
    missing = set().union(*(pairs for _, pairs in candidates))
    chosen = []
    while missing:
        choice, pairs = max(candidates, key=lambda candidate: len(candidate[1] & missing))
        chosen.append(choice)
        missing -= pairs
    return chosen
