"""A process that offers embeddings twice over NIXL, writes the descriptors as lines of JSON, and waits to be killed."""

import asyncio
import sys

import msgspec

from kv_runtime.clock import SystemClock
from worker_agent.media.nixl_transfer import NixlEmbeddingTransfer

EMBEDDINGS = bytes(range(256)) * 20_000


async def main() -> None:
    transfer = NixlEmbeddingTransfer(SystemClock())
    await transfer.start()
    for _ in range(2):
        sys.stdout.buffer.write(msgspec.json.encode(await transfer.offer(EMBEDDINGS)) + b"\n")
        sys.stdout.buffer.flush()
    (part,) = transfer.parts(0)
    await part.run(asyncio.Event())


if __name__ == "__main__":
    asyncio.run(main())
