"""The page that teaches the API needs no other host, and its own curl line works."""

import re
import shlex
from html import unescape

import httpx

from service.rest.docs import render_docs


async def test_the_page_loads_nothing_from_elsewhere_and_its_example_works(edges, plane):
    async with httpx.AsyncClient(base_url=f"http://{edges.http}") as client:
        page = (await client.get("/docs")).text
        assert "<script" not in page
        assert "cdn" not in page
        for line in re.findall(r"<pre>(curl .*?)</pre>", page):
            _, url, _, body = shlex.split(unescape(line))
            reply = await client.post(url.replace("{name}", "clicks").replace("{version}", "1"), content=body)
            assert reply.status_code == 200, reply.text
    assert {frozenset(request.keys) for request in plane.lookups} == {frozenset({"user", "item"})}
    assert len(plane.lookups) == 3


def test_what_a_schema_says_is_escaped():
    schema = {
        "info": {"title": "<b>", "description": "<i>"},
        "paths": {"/<x>": {"get": {"summary": "<u>", "responses": {}}}},
    }
    page = render_docs(schema, "http://host")
    assert not any(tag in page for tag in ("<b>", "<i>", "<u>", "<x>"))
