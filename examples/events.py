"""Owns the sample event log and the hash that turns its string keys into 64-bit ids; must not know any module."""

import csv
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

EVENT_LOG = Path(__file__).with_name("movietweetings.csv.gz")


def hash_id(key: str) -> int:
    """Hash a string key to the signed 64-bit id that the collections know it by.

    BLAKE2b (RFC 7693) of the key's UTF-8 bytes with an 8-byte digest, no key, salt or person; the digest is read as a
    little-endian signed integer. Leading zeros matter: ``"0114508"`` and ``"114508"`` are two keys.

    >>> hash_id("0114508")
    6255965864902481181
    """
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little", signed=True)


@dataclass(kw_only=True, slots=True, frozen=True)
class Events:
    """Events in the order in which they happened; position n of every field is one event."""

    users: list[str]
    """Keys of the users."""
    items: list[str]
    """Keys of the items."""
    ratings: torch.Tensor
    """FP32 [N], 0 to 10."""
    times: torch.Tensor
    """INT64 [N], seconds since the epoch, never decreasing."""

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.users)


def read_events(path: Path = EVENT_LOG, *, limit: int | None = None) -> Events:
    """Read the first ``limit`` events of a log (all of them by default), keys as text.

    Raises:
        ValueError: The log's columns are not ``ts,user,item,rating``, or ``limit`` leaves no event.
    """
    columns = ("ts", "user", "item", "rating")
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        reader = csv.reader(lines)
        header = tuple(next(reader, ()))
        if header != columns:
            raise ValueError(f"{path}: columns are {','.join(header)}, the trainer reads {','.join(columns)}")
        rows = [row for _, row in zip(range(limit), reader, strict=False)] if limit is not None else list(reader)
    if not rows:
        raise ValueError(f"events {limit}: no event of {path} is left; use a number of 1 or more")
    return Events(
        users=[row[1] for row in rows],
        items=[row[2] for row in rows],
        ratings=torch.tensor([float(row[3]) for row in rows]),
        times=torch.tensor([int(row[0]) for row in rows]),
    )
