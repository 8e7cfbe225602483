"""Owns the choices of an export that do not reach the manifest, and what its numbers may be; must not import torch."""

from enum import StrEnum

from export.contract import INT64_MAX
from export.errors import ExportError


class Evicted(StrEnum):
    """What to do when ids were evicted and nobody has called ``evict()``: their rows still hold the old embeddings."""

    REFUSE = "refuse"
    """An error."""
    RESET = "reset"
    """Serve the rows that ``evict()`` would name as zeros, as FBGEMM's ``reset_embedding_weight_momentum`` leaves them."""


def check_number(field: str, value: object) -> None:
    """Raise ExportError unless an option is a whole number from 1 on that fits in 64 bits."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= INT64_MAX:
        raise ExportError(f"{field} {value!r}: use a whole number from 1 to {INT64_MAX}")
