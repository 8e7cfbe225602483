"""A shard in a process of its own that answers when it is told to: run with the rows of its answers.

Prints its port. A line on its input makes it hold every call, the next one makes it answer them; it echoes each.
"""

import asyncio
import sys

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

WIDTH = 64


async def serve(rows: int) -> None:
    message = service_pb2.ModelInferResponse()
    message.outputs.add(name="embeddings", datatype="FP32", shape=(rows, WIDTH))
    message.raw_output_contents.append(np.ones((rows, WIDTH), dtype=np.float32).tobytes())
    reply = message.SerializeToString()
    gate = asyncio.Event()
    gate.set()

    async def infer(request, context):
        await gate.wait()
        return reply

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)])
    handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    while line := await asyncio.to_thread(sys.stdin.readline):
        gate.clear() if gate.is_set() else gate.set()
        print(line, end="", flush=True)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
