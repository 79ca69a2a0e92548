"""What the newest routed requests say of the tree's prefixes: how warm they are, who uses them, and their text.

    heat of a request    2 ** -(its age / `HALF_LIFE_S`), at the last block of its prompt
    use of a node        models and tenants of the newest decisions whose prompts have the node's first block

A request that was routed in a mode without overlap has no blocks, and does not count.
"""

from collections.abc import Iterable, Sequence

from indexer.embedded import NodeUse, OutlineNode, PassedRequest
from kv_protocol.codec import pack_u64
from router.decision.kept_prompts import KeptPrompts
from router.decision.routing import Lease

REQUESTS_MAX = 8192
HALF_LIFE_S = 60.0
USED_MAX = 1000
"""Newest decisions that uses are of."""
NAMES_MAX = 8
EXCERPT_TOKENS = 64
_HASH_BYTES = 8


def warmth(ends: Sequence[tuple[int, float]], now_s: float) -> list[PassedRequest]:
    """Return the newest `REQUESTS_MAX` requests with their heat at this time."""
    newest = sorted(ends, key=lambda each: each[1])[-REQUESTS_MAX:]
    return [PassedRequest(block, 2.0 ** (-max(0.0, now_s - at_s) / HALF_LIFE_S), at_s) for block, at_s in newest]


def uses(nodes: Sequence[OutlineNode], records: Iterable[Lease], kept: KeptPrompts | None = None) -> list[NodeUse]:
    """Return the use of each node, with text where prompts are kept; at most `NAMES_MAX` models and tenants each."""
    found = [NodeUse([], []) for _ in nodes]
    places = {node.depth_blocks - node.blocks for node in nodes}
    by_block = {(node.depth_blocks - node.blocks, pack_u64([node.first])): at for at, node in enumerate(nodes)}
    for request in (record.verdict.request for record in records):
        hashes = request.sequence_hashes
        for place in places:
            at = by_block.get((place, hashes[place * _HASH_BYTES : (place + 1) * _HASH_BYTES]))
            if at is None:
                continue
            use = found[at]
            _name(use.models, request.model)
            _name(use.tenants, request.tenant)
            if kept is not None and use.text is None:
                tokens = min(nodes[at].blocks * request.block_size, EXCERPT_TOKENS)
                use.text = kept.excerpt(request.request_id, hashes, place * request.block_size, tokens)
    return found


def _name(names: list[str], name: str) -> None:
    if name and name not in names and len(names) < NAMES_MAX:
        names.append(name)
