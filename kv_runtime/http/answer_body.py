"""The bodies of answers to this process's own requests."""

import aiohttp

_CHUNK_BYTES = 64 << 10


async def bounded_body(response: aiohttp.ClientResponse, bytes_max: int) -> bytes | None:
    """Return the whole body; None if it is longer than `bytes_max`, of which no more than a chunk beyond is read."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        data += chunk
        if len(data) > bytes_max:
            return None
    return bytes(data)
