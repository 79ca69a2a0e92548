"""`python -m tests.support.slow_router`: the router, with a parser that is quadratic in the objects of a body."""

import asyncio
from typing import Any

from router.__main__ import main
from router.request.reading import BodyParser, ReadBody

_read = BodyParser.read


def _read_slowly(
    self: BodyParser, path: str, data: bytes | bytearray, *decode: Any
) -> ReadBody | asyncio.Future[ReadBody]:
    """Count, for each object, those before it: a thousand cost nothing, ten thousand a second."""
    at = data.find(b"{")
    while at >= 0:
        data.count(b"{", 0, at)
        at = data.find(b"{", at + 1)
    return _read(self, path, data, *decode)


if __name__ == "__main__":
    BodyParser.read = _read_slowly  # type: ignore[method-assign, assignment]
    main()
