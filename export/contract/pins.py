"""Owns a collection's pin: the one version that is to be served whatever is newer, said in the repository itself.

Every front tier that watches the repository follows it, also one that is started later.
"""

import json
import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from export.contract.layout import RepositoryError
from export.contract.terms import Strict

PIN_FILE = "pin.json"


class _Pin(Strict):
    version: Annotated[int, Field(ge=1)]


def read_pin(repo: Path, collection: str) -> int | None:
    """The version that a collection is pinned to; None: it is not, and the newest is served.

    Raises:
        RepositoryError: There is a pin, and it is not one.
    """
    path = repo / collection / PIN_FILE
    try:
        return parse_pin(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, RepositoryError) as exc:
        raise RepositoryError(f"{path}: {exc}") from exc


def parse_pin(content: bytes) -> int:
    """The version that a pin's file names; raises ``RepositoryError``."""
    try:
        return _Pin.model_validate_json(content).version
    except ValidationError as exc:
        raise RepositoryError(
            'not a pin, which is {"version": 3}; write it with `kjtserve rollback`, or remove it to serve the newest'
        ) from exc


def write_pin(repo: Path, collection: str, version: int | None) -> None:
    """Pin a collection to a version, or with None serve the newest again; the pin appears, or goes, at once.

    Raises:
        OSError: The repository cannot be written.
    """
    path = repo / collection / PIN_FILE
    if version is None:
        path.unlink(missing_ok=True)
        return
    draft = path.with_name(f".{PIN_FILE}-{os.getpid()}")
    draft.write_text(json.dumps({"version": version}) + "\n", encoding="utf-8")
    draft.replace(path)
