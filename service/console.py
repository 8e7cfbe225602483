"""Owns asking a running front tier over HTTP from a terminal, and showing the reply; standard library and rich only."""

import io
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from export.contract import UserError

Features = Mapping[str, list[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A reply of the people's route, as text and read."""

    features: Features
    text: str
    reply: dict[str, Any]


def ask(url: str, collection: str, features: Features, *, timeout_s: float = 10.0) -> Answer:
    """POST one lookup.

    Raises:
        UserError: Nobody answers at ``url``, or the answer is an error.
    """
    request = urllib.request.Request(  # noqa: S310 - the address is the caller's own
        _address(url, collection),
        data=json.dumps(_body(features)).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:  # noqa: S310 - as above
            text = response.read().decode()
    except urllib.error.HTTPError as exc:
        raise UserError(f"{url} answered {exc.code}: {_reason(exc.read())}") from exc
    except (OSError, ValueError) as exc:
        raise UserError(f"{url}: {exc}; is `kjtserve serve` running there?") from exc
    return Answer(features=features, text=text, reply=json.loads(text))


def curl_line(url: str, collection: str, features: Features) -> str:
    """The same lookup for a shell."""
    return (
        f"curl -s '{_address(url, collection)}' -H 'Content-Type: application/json' -d '{json.dumps(_body(features))}'"
    )


def render_table(answer: Answer, *, columns: int = 4) -> str:
    """A small table of a reply: a line for each id, with its row, whether it is known, and the row's first numbers."""
    reply = answer.reply
    table = Table(title=f"version {reply['version']}", title_justify="left")
    for heading in ("feature", "sample", "id", "row", "known", "embedding"):
        table.add_column(heading)
    for name, samples in reply["embeddings"].items():
        ids = answer.features[name.partition("@")[0]]
        for b, rows in enumerate(samples):
            for i, row in enumerate(rows):
                known = "yes" if reply["hits"][name][b][i] else "no"
                numbers = "  ".join("NaN" if number is None else f"{number:+.4f}" for number in row[:columns])
                dots = "  …" if len(row) > columns else ""
                table.add_row(name, str(b), str(ids[b][i]), str(reply["row_ids"][name][b][i]), known, numbers + dots)
    out = io.StringIO()
    Console(file=out, width=110).print(table)
    return out.getvalue().rstrip()


def _body(features: Features) -> dict[str, Any]:
    return {"features": features, "row_ids": True, "hits": True}


def _address(url: str, collection: str) -> str:
    return f"{url.rstrip('/')}/v1/collections/{collection}:lookup"


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
