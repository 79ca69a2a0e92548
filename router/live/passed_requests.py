"""The newest routed requests, by the last block of their prompts: what makes prefixes of the tree warm.

    heat of a request    2 ** -(its age / `HALF_LIFE_S`)

A request that was routed in a mode without overlap has no blocks, and does not count.
"""

from collections.abc import Sequence

from indexer.embedded import PassedRequest

REQUESTS_MAX = 8192
HALF_LIFE_S = 60.0


def warmth(ends: Sequence[tuple[int, float]], now_s: float) -> list[PassedRequest]:
    """Return the newest `REQUESTS_MAX` requests with their heat at this time."""
    newest = sorted(ends, key=lambda each: each[1])[-REQUESTS_MAX:]
    return [PassedRequest(block, 2.0 ** (-max(0.0, now_s - at_s) / HALF_LIFE_S), at_s) for block, at_s in newest]
