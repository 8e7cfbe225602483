"""Says in one line whether this Python's packages are those of a lock file, and what to do if not; installs nothing.

Standard library only: it judges an environment that may be half installed.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)")
_MAX_NAMED = 5


def read_pins(lock: str) -> dict[str, str]:
    """Version by name of a lock file's text; ValueError for a line that is no ``name==version``."""
    pins: dict[str, str] = {}
    for number, line in enumerate(lock.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pin = _PIN.fullmatch(line.strip())
        if pin is None:
            raise ValueError(f"line {number}: {line.strip()!r} is not name==version")
        pins[pin["name"]] = pin["version"]
    return pins


def find_faults(pins: dict[str, str]) -> Iterator[str]:
    """What differs from the pins; a local version such as 2.13.0+cpu is the 2.13.0 that is pinned."""
    for name, wanted in pins.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} {wanted} is missing"
            continue
        if wanted not in {found, found.partition("+")[0]}:
            yield f"{name} is {found}, not {wanted}"


def main(lock: Path) -> None:
    """Exit 1 with one line on stderr when the environment is not the lock file's."""
    try:
        faults = list(find_faults(read_pins(lock.read_text(encoding="utf-8"))))
    except ValueError as exc:
        sys.exit(f"setup: {lock}: {exc}")
    if faults:
        named = "; ".join(faults[:_MAX_NAMED]) + (f"; and {len(faults) - _MAX_NAMED} more" * (len(faults) > _MAX_NAMED))
        sys.exit(f"setup: the packages are not those of {lock}: {named}; run `make setup` again, see pip's lines above")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
