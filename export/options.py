"""Owns the choices of an export that do not reach the manifest; must not import torch."""

from enum import StrEnum


class Evicted(StrEnum):
    """What to do when ids were evicted and nobody has called ``evict()``: their rows still hold the old embeddings."""

    REFUSE = "refuse"
    """An error."""
    RESET = "reset"
    """Serve the rows that ``evict()`` would name as zeros, as FBGEMM's ``reset_embedding_weight_momentum`` leaves them."""
