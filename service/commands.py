"""Owns the front tier's commands, ``serve`` and ``lookup``: options in, calls out; no logic of its own.

Heavy imports wait until a command runs, so that ``--help`` is quick.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer


def _print_settings(wanted: bool) -> None:
    if wanted:
        from service.settings import describe_settings

        typer.echo(describe_settings())
        raise typer.Exit


def serve(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Model repository that `kjtserve export` wrote.")],
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="HTTP port (default 8080; 0 takes a free one).")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="gRPC port (default 8081; 0 takes a free one).")
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…",
            help="gRPC addresses of the Tritons that host shards 0, 1, …; one address alone hosts them all. "
            "Without it, a Triton is started here, on free loopback ports.",
        ),
    ] = None,
    settings: Annotated[  # noqa: ARG001  its callback ends the command
        bool,
        typer.Option(
            "--settings",
            is_eager=True,
            callback=_print_settings,
            help="Print every setting with its default, and exit.",
        ),
    ] = False,
) -> None:
    """Serve every collection of REPO over HTTP and gRPC (KServe v2) until SIGTERM or Ctrl-C.

    The newest version of each answers, or the one that is pinned; newer ones are taken up as they appear.

    Every other setting is an environment variable KJTSERVE_…; --settings lists them.
    """
    from service.server import read_settings, run_server

    addresses = None if shards is None else _read_addresses(shards)
    asyncio.run(run_server(repo, read_settings(http_port=http_port, grpc_port=grpc_port), shards=addresses))


def lookup(
    collection: Annotated[str, typer.Argument(metavar="COLLECTION", help="Name of the collection.")],
    feature: Annotated[
        list[str],
        typer.Option(
            "--feature",
            "-f",
            metavar="NAME=1,2;3",
            help="Ids of a feature; ';' parts samples. Give every feature once.",
        ),
    ],
    url: Annotated[str, typer.Option(help="HTTP address of the front tier.")] = "http://127.0.0.1:8080",
    as_json: Annotated[bool, typer.Option("--json", help="Print the reply as JSON.")] = False,
) -> None:
    """Look ids up and print their rows: `kjtserve lookup clicks -f user=17,42 -f item=7`."""
    from service.console import ask, render_table

    features = dict(_read_feature(text) for text in feature)
    answer = ask(url, collection, features)
    typer.echo(answer.text if as_json else render_table(answer))


def rollback(
    repo: Annotated[Path, typer.Argument(metavar="REPO", help="Model repository that the front tiers watch.")],
    name: Annotated[str | None, typer.Option(help="Collection. [dim]default: the only one")] = None,
    to: Annotated[
        int | None,
        typer.Option("--to", min=1, help="Version to serve. [dim]default: the one before what is served now"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Serve the newest version again.")] = False,
) -> None:
    """Go back to an older version, and stay there whatever is published, until --follow takes that back.

    It is written into the repository, so every front tier that watches it follows at once, and so does one that starts
    later.

    [bold]Example[/bold]: kjtserve rollback repo --name clicks
    """
    from service.versions.rollback import follow_newest, roll_back

    if follow and to is not None:
        raise typer.BadParameter("give --to or --follow, not both")
    if follow:
        typer.echo(follow_newest(repo, name))
    else:
        typer.echo(roll_back(repo, name, to))


def _read_addresses(text: str) -> list[str]:
    addresses = [address.strip() for address in text.split(",")]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
            raise typer.BadParameter(f"{address!r} is not HOST:PORT; part several by commas", param_hint="--shards")
    return addresses


def _read_feature(text: str) -> tuple[str, list[list[int]]]:
    name, equals, ids = text.partition("=")
    rule = f"{text!r}: write NAME=1,2 (one sample) or NAME=1,2;3 (two samples)"
    if not equals:
        raise typer.BadParameter(rule, param_hint="--feature")
    try:
        return name, [[int(part) for part in sample.split(",") if part.strip()] for sample in ids.split(";")]
    except ValueError:
        raise typer.BadParameter(rule, param_hint="--feature") from None
