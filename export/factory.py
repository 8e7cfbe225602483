"""Owns the way from MODULE:FACTORY to a module; must not know what will be done with it."""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from export.errors import ExportError

if TYPE_CHECKING:
    from torch import nn


def load_module(target: str) -> "nn.Module":
    """Import MODULE, with the working directory on the path, and take FACTORY: a module, or a callable that makes one.

    Args:
        target: As on the command line, e.g. ``training.model:build``; FACTORY may be dotted.

    Raises:
        ExportError: Something is not found, fails, or is no ``torch.nn.Module``; names it.
    """
    module_name, colon, factory_name = target.partition(":")
    if not (colon and module_name and factory_name):
        raise ExportError(f"{target!r}: write MODULE:FACTORY, e.g. training.model:build")
    found = _factory(target, _import(target, module_name), factory_name)
    import torch

    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise ExportError(f"{target}: neither a torch.nn.Module nor a callable, but {type(found).__name__}")
        try:
            found = found()
        except Exception as exc:  # the factory is the user's code
            raise ExportError(f"{target}: calling it raised {type(exc).__name__}: {exc}") from exc
    if not isinstance(found, torch.nn.Module):
        raise ExportError(f"{target}: calling it gave {type(found).__name__}, not a torch.nn.Module")
    return found


def _import(target: str, module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and (module_name == exc.name or module_name.startswith(f"{exc.name}.")):
            raise ExportError(f"{target}: no module {exc.name!r}; searched {here} and the installed packages") from exc
        raise ExportError(f"{target}: importing {module_name} needs {exc.name!r}, which is not installed") from exc
    except Exception as exc:  # the module is the user's code
        raise ExportError(f"{target}: importing {module_name} raised {type(exc).__name__}: {exc}") from exc


def _factory(target: str, module: Any, factory_name: str) -> Any:
    found = module
    for part in factory_name.split("."):
        if not hasattr(found, part):
            raise ExportError(f"{target}: {getattr(found, '__name__', found)} has no {part!r}")
        found = getattr(found, part)
    return found
