"""Owns the way from Triton's Python backend into the installed shard runtime; the exporter copies it into every shard.

Must stay thin: whatever a shard does lies in ``model_repo.runtime``, so that a fix there needs no new export.
"""

import os
import sys

# The stub's interpreter is isolated (sys.flags.ignore_environment) and leaves PYTHONPATH to us.
sys.path[:0] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in {"", *sys.path}]

try:
    from model_repo.runtime import TritonPythonModel
except ModuleNotFoundError as exc:
    raise ImportError(
        f"no module {exc.name!r} in Triton's Python {sys.version_info.major}.{sys.version_info.minor}: install kjtserve "
        f"with its 'cpu' or 'gpu' extra there, or put its site-packages on PYTHONPATH; searched {sys.path}"
    ) from exc

__all__ = ["TritonPythonModel"]
