"""Many clients that send one large request over and over: ``flood.py HOST PORT CLIENTS IDS SECONDS``.

Plain sockets and one prepared body, so that the clients cost the machine as little as they can. Prints a JSON object:
how often which status came back.
"""

import asyncio
import json
import sys
from collections import Counter

import numpy as np


def make_request(num_ids: int) -> bytes:
    tensors = {"values": np.arange(num_ids, dtype=np.int64), "lengths": np.array([num_ids, 0], dtype=np.int64)}
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [a.size], "parameters": {"binary_data_size": a.nbytes}}
        for name, a in tensors.items()
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True, "timeout_ms": 60_000}}).encode()
    body = head + b"".join(a.tobytes() for a in tensors.values())
    lines = [
        "POST /v2/models/clicks/infer HTTP/1.1",
        "Host: flood",
        f"Content-Length: {len(body)}",
        f"Inference-Header-Content-Length: {len(head)}",
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


async def ask(host: str, port: int, request: bytes) -> str:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    try:
        writer.write(request)
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        left = int(head.split("content-length: ")[1].split("\r\n")[0])
        while left:
            left -= len(await reader.read(min(left, 1 << 20)))
        return head.split()[1]
    finally:
        writer.close()


async def main(host: str, port: int, clients: int, num_ids: int, seconds: float) -> None:
    request, counts = make_request(num_ids), Counter()
    stop = asyncio.get_running_loop().time() + seconds

    async def client() -> None:
        while asyncio.get_running_loop().time() < stop:
            status = await ask(host, port, request)
            counts[status] += 1
            if status == "429":
                await asyncio.sleep(0.1)

    await asyncio.gather(*(client() for _ in range(clients)))
    print(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])))
