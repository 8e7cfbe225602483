"""Owns the page that teaches the API: the OpenAPI schema as plain HTML.

FastAPI's own page loads its script from a public CDN, and so is blank inside a closed cluster. This one needs no
script and no other host.
"""

import json
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse

from service.rest.exchange import begin

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a }
h2 { margin-top: 2.5rem; border-top: 1px solid #ddd; padding-top: 1rem; font-size: 1.1rem }
pre { background: #f5f5f5; padding: .75rem; overflow-x: auto } code, pre { font-size: .875rem }
td { padding: .1rem 1rem .1rem 0; vertical-align: top }
"""


def docs_routes(schema: Callable[[], dict[str, Any]]) -> APIRouter:
    """The route of the page.

    Args:
        schema: Gives the OpenAPI schema.
    """
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> HTMLResponse:
        begin(request, "docs")
        return HTMLResponse(render_docs(schema(), str(request.base_url).rstrip("/")))

    return router


def render_docs(schema: dict[str, Any], base_url: str) -> str:
    """The whole page.

    Args:
        schema: OpenAPI schema.
        base_url: Where the reader reached the server, for the curl lines.
    """
    body = "".join(
        part
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
        for part in _operation(schema, base_url, method.upper(), path, operation)
    )
    title = escape(schema["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{title}</h1><pre>{escape(schema['info']['description'].strip())}</pre>"
        f'<p>The same for programs: <a href="/openapi.json">OpenAPI schema</a>.</p>{body}</body></html>'
    )


def _operation(
    schema: dict[str, Any], base_url: str, method: str, path: str, operation: dict[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method} {escape(path)}</code></h2><p>{escape(operation.get('summary', ''))}</p>"
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}</p>"
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        yield _fields(schema, content["schema"])
        line = f"curl {base_url}{path} -d '{json.dumps(_example(schema, content))}'"
        yield f"<pre>{escape(line)}</pre>"
    for status, reply in operation.get("responses", {}).items():
        yield f"<p><code>{escape(status)}</code> {escape(reply.get('description', ''))}</p>"
        answer = reply.get("content", {}).get("application/json", {})
        if status == "200" and "examples" in _resolve(schema, answer.get("schema", {})):
            yield f"<pre>{escape(json.dumps(_example(schema, answer)))}</pre>"


def _fields(schema: dict[str, Any], model: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(entry.get('description', ''))}</td></tr>"
        for name, entry in _resolve(schema, model).get("properties", {}).items()
    )
    return f"<table>{rows}</table>"


def _example(schema: dict[str, Any], content: dict[str, Any]) -> Any:
    if "example" in content:
        return content["example"]
    return _resolve(schema, content.get("schema", {})).get("examples", [{}])[0]


def _resolve(schema: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference to a named schema."""
    if "$ref" in model:
        found: dict[str, Any] = schema["components"]["schemas"][model["$ref"].rpartition("/")[2]]
        return found
    return model
