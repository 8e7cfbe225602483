"""Owns the console script ``kjtserve``: finds the commands of every installed part and turns errors into one line.

Each part registers its commands as entry points (group ``kjtserve.commands``), so this package imports none of them.
"""

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import typer
from rich.console import Console

from export.contract import Stopped, UserError

ORDER = ("export", "delta", "verify", "inspect", "diff", "serve", "lookup", "rollback", "sync", "bench")
"""The commands by the order in which a person meets them."""


def build_app() -> typer.Typer:
    """The command line with every command that is installed."""
    app = typer.Typer(
        name="kjtserve",
        help="Serve the embeddings of TorchRec models: export once, answer KeyedJaggedTensor lookups over HTTP and gRPC.",
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root() -> None:
        """Keeps the commands as sub-commands, whatever their number."""

    for point in _commands():
        try:
            app.command(point.name)(point.load())
        except ImportError as exc:
            app.command(point.name, help=f"Not available: {exc}.")(_unavailable(point, exc))
    return app


def main() -> None:
    """Run the command line: exit 0, 2 for wrong usage, 1 otherwise with one clear line on stderr."""
    if os.environ.get("KJTSERVE_DEBUG"):
        build_app()()
        return
    try:
        build_app()()
    except (UserError, Stopped) as exc:
        _fail(str(exc))
    except KeyboardInterrupt:
        _fail("interrupted")
    except Exception as exc:  # noqa: BLE001 - the edge towards a person
        _fail(f"{type(exc).__name__}: {exc} (a bug; KJTSERVE_DEBUG=1 shows where)")


def _commands() -> list[EntryPoint]:
    found = {point.name: point for point in entry_points(group="kjtserve.commands")}
    return [found[name] for name in ORDER if name in found]


def _unavailable(point: EntryPoint, cause: ImportError) -> Callable[[], None]:
    def command() -> None:
        raise UserError(
            f"{point.name} needs a package that is not installed ({cause}); try `pip install kjtserve[export]`"
        )

    return command


def _fail(message: str) -> None:
    Console(stderr=True, soft_wrap=True).print(f"kjtserve: {message}", style="red", markup=False, highlight=False)
    sys.exit(1)
