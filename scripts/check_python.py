"""Says in one line whether this Python can carry the project, and what to do if not."""

import sys

if sys.version_info[:2] != (3, 11):
    version = ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(f"setup: Python 3.11 is needed, this is {version}; run `make PYTHON=/path/to/python3.11 …`")
try:
    import ensurepip  # noqa: F401
except ImportError:
    sys.exit("setup: this Python cannot make a virtual environment; on Debian install python3.11-venv")
