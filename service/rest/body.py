"""Owns reading a request's body: admitted before the first byte, counted while it streams, capped when it unpacks.

It also watches for the client to go away while its answer is being made. Must not know what the bytes mean.
"""

import asyncio
import zlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from service.admission import Permit
from service.errors import DeadlineExceeded, InvalidArgument, TooLarge
from service.offload import Offload
from service.plane import Plane
from service.rest.exchange import ClientGone, Exchange

T = TypeVar("T")

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""zlib's argument for each content coding; ``deflate`` is the zlib format (RFC 9110, section 8.4.1.2)."""

ALIGNMENT = 8


class BodyReader:
    """Reads bodies for one application.

    Args:
        plane: Who lets requests in.
        offload: Where large bodies are unpacked.
        max_bytes: Largest body, as sent and unpacked.
        max_json_bytes: Largest JSON in it.
        max_seconds: Longest time that a client may take to send one.
    """

    def __init__(
        self, plane: Plane, offload: Offload, *, max_bytes: int, max_json_bytes: int, max_seconds: float
    ) -> None:
        self._plane = plane
        self._offload = offload
        self._max_bytes = max_bytes
        self._max_json_bytes = max_json_bytes
        self._max_seconds = max_seconds

    async def read(self, request: Request, exchange: Exchange, *, header_bytes: int = 0) -> memoryview:
        """Read the whole body, unpacked.

        Args:
            request: Whose body.
            exchange: Gets the permit.
            header_bytes: Length of the JSON at the body's start; what follows it is placed at an aligned address, so
                that tensors are used where they lie.

        Raises:
            Overloaded: No place is left; nothing was read.
            TooLarge: The body is over the limit; the rest was not read.
            InvalidArgument: The content coding is unknown, or the body does not unpack.
            DeadlineExceeded: The client sent too slowly.
            ClientGone: The client went away.
        """
        coding = _content_coding(request)
        declared = _declared_bytes(request)
        if declared is not None and declared > self._max_bytes:
            raise TooLarge(f"Content-Length: {declared} bytes, the limit is {self._max_bytes}")
        permit = exchange.admit(self._plane, declared or 0)
        pad = -header_bytes % ALIGNMENT if coding is None else 0
        try:
            async with asyncio.timeout(self._max_seconds):
                body = await self._receive(request, permit, declared or 0, pad)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"body: not sent within {self._max_seconds:g} s") from exc
        if coding is not None:
            body = memoryview(await self._offload.run(len(body), unpack, body, coding, self._max_bytes))
            permit.grow(len(body))
        exchange.body_read()
        permit.received_at = asyncio.get_running_loop().time()
        self._check_json(min(header_bytes or len(body), len(body)))
        permit.work()
        return body

    def _check_json(self, nbytes: int) -> None:
        if nbytes > self._max_json_bytes:
            raise TooLarge(
                f"body: {nbytes} bytes of JSON, the limit is {self._max_json_bytes}; send tensors as binary data"
            )

    async def _receive(self, request: Request, permit: Permit, admitted: int, pad: int) -> memoryview:
        buffer = bytearray(pad + admitted)  # large ones are zero pages: memory is used as the bytes come
        end = pad
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            if end - pad + len(chunk) > self._max_bytes:
                raise TooLarge(f"body: more than the limit of {self._max_bytes} bytes")
            if end - pad + len(chunk) > admitted:
                permit.grow(end - pad + len(chunk) - admitted)
                admitted = end - pad + len(chunk)
            buffer[end : end + len(chunk)] = chunk
            end += len(chunk)
            if not message.get("more_body", False):
                return memoryview(buffer)[pad:end]


def unpack(body: memoryview, coding: str, max_bytes: int) -> bytes:
    """Undo a content coding.

    Raises:
        InvalidArgument: The body is not in that coding, is cut short, or has bytes after its end.
        TooLarge: It unpacks to more than ``max_bytes``.
    """
    stream = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        unpacked = stream.decompress(body, max_bytes + 1)
    except zlib.error as exc:
        raise InvalidArgument(f"Content-Encoding: {coding}, but the body does not unpack: {exc}") from exc
    if len(unpacked) > max_bytes:
        raise TooLarge(f"body: unpacks to more than the limit of {max_bytes} bytes")
    if not stream.eof:
        raise InvalidArgument(f"Content-Encoding: {coding}, but the body is cut short")
    if stream.unused_data:
        raise InvalidArgument(f"Content-Encoding: {coding}, but {len(stream.unused_data)} bytes follow its end")
    return unpacked


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work`` for as long as the client waits for it.

    Raises:
        ClientGone: The client closed its connection; the work was cancelled, and has ended.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _content_coding(request: Request) -> str | None:
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding in {"identity", ""}:
        return None
    if coding not in _WINDOW_BITS:
        raise InvalidArgument(f"Content-Encoding: {coding[:80]!r}; use gzip or deflate, or leave it out")
    return coding


def _declared_bytes(request: Request) -> int | None:
    text = request.headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise InvalidArgument(f"Content-Length: {text[:80]!r}; use the number of bytes")
    return int(text)
