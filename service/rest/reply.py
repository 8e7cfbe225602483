"""Owns sending a reply in pieces, and compressing it when the client asks. Must not know what the bytes mean."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.rest.exchange import ClientGone

PIECE_BYTES = 1 << 20
"""The server waits for the client after each piece, so that a slow one does not make it hold the whole reply twice."""

MIN_COMPRESSED_BYTES = 1024

_WINDOW_BITS = {"gzip": 31, "deflate": 15}


class PiecesResponse(Response):
    """A body that lies in several buffers, sent as they are.

    Args:
        pieces: The body, in order; buffers of bytes.
        headers: Extra headers.
        media_type: Content type.
        max_stall_s: Longest wait for the client to take a piece.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | memoryview],
        *,
        headers: Mapping[str, str],
        media_type: str,
        max_stall_s: float,
    ) -> None:
        self._pieces = pieces
        self.status_code = 200
        self.media_type = media_type
        self._max_stall_s = max_stall_s
        self.background = None
        self.body = b""
        self.init_headers({**headers, "content-length": str(sum(map(len, pieces)))})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI signature
        """Send the pieces; returns when the last has gone out, or the client has.

        Raises:
            ClientGone: The client has not taken a piece for too long.
        """
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            for start in range(0, len(piece), PIECE_BYTES):
                part = piece[start : start + PIECE_BYTES]
                await self._send(send, part, more=True)
                await asyncio.sleep(0)  # lets the loop see that the client has gone, and serve others
        # An empty last part: the server drains what it holds before it takes one more.
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, part: bytes | memoryview, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._max_stall_s):
                await send({"type": "http.response.body", "body": part, "more_body": more})
        except TimeoutError as exc:
            # Without an end to it, a client that never reads would keep its permit for ever.
            raise ClientGone from exc


def array_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array, where they lie."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def choose_coding(accepted: str | None, *, is_binary: bool) -> str | None:
    """The content coding for a reply, or None.

    Embeddings hardly compress, and HTTP libraries list every coding they know without being asked to. So a list is
    taken as leave, and used for JSON only; one coding alone, as ``tritonclient`` sends it on request, as a wish.
    """
    wanted = [
        token.strip().partition(";")[0].strip().lower()
        for token in (accepted or "").split(",")
        if not token.replace(" ", "").lower().endswith((";q=0", ";q=0.0", ";q=0.00", ";q=0.000"))
    ]
    if is_binary and len(wanted) > 1:
        return None
    return next((coding for coding in ("gzip", "deflate") if coding in wanted), None)


def pack(pieces: Sequence[bytes | memoryview], coding: str) -> list[bytes | memoryview]:
    """Apply a content coding, at the level that costs least."""
    stream = zlib.compressobj(1, zlib.DEFLATED, _WINDOW_BITS[coding])
    packed: list[bytes | memoryview] = [stream.compress(piece) for piece in pieces]
    return [*packed, stream.flush()]
