"""Decodes request bodies: small ones at once, large ones on a thread, within bounds.

    SCANNED_BYTES at most    decoded on the event loop: a few milliseconds at worst
    larger                   scanned, its images cut out, decoded: on a thread (`kv_protocol/body_limits.py`)

The threads (`encoding_pool.py`) are apart from those that encode, so that a body never waits for another request's
prompt; bodies of more than 1 MiB have one of their own.
"""

import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_protocol.body_limits import SCANNED_BYTES, Body, BodyLimits, Bytes, read_body
from kv_protocol.openai.requests import Inbound, decode_inbound
from router.prompt.encoding_pool import EncodingPool

if TYPE_CHECKING:
    import asyncio


ReadBody = tuple[Body, Inbound]
"""A request body, and the fields that the router reads of it."""


class BodyParser:
    """Parses the bodies of all requests. The data plane bounds the bodies that wait: `data.bodies_bytes_max`."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self.pool = EncodingPool(1, sys.maxsize, name="body-reader")
        """Its parts have to run: its threads parse large bodies."""

    def read(
        self, path: str, data: Bytes, decode: Callable[[str, Bytes], Inbound] = decode_inbound
    ) -> "ReadBody | asyncio.Future[ReadBody]":
        """Return the parsed body of a request to `path`, or its future.

        Raises (also the future):
            RequestInvalid: it is no request; `BodyTooLarge`: it exceeds a bound.
        """
        if len(data) <= SCANNED_BYTES:
            return Body(data), decode(path, data)

        def read_large() -> ReadBody:
            body = read_body(data, self._limits, uuid.uuid4().hex)
            return body, decode(path, body.text)

        return self.pool.submit(read_large, len(data))
