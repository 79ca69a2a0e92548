"""Who uses a prefix: models, tenants and the text of the newest decisions through it."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from indexer.embedded import OutlineNode
from kv_protocol.codec import pack_u64
from router.decision.kept_prompts import KeptPrompts
from router.live.decision_rows import EXCERPT_TOKENS, uses
from tests.unit.router.samples import route


def record(tenant: str, *hashes: int, request_id: str = "r") -> Any:
    """Return a decision on a prompt of these blocks."""
    request = route(tenant=tenant, request_id=request_id, block_size=2, sequence_hashes=pack_u64(hashes))
    return SimpleNamespace(verdict=SimpleNamespace(request=request))


def node(first: int, *, blocks: int, depth: int) -> OutlineNode:
    """Return a node."""
    return OutlineNode(first, 0, blocks, blocks, depth, 0, 0.0, 0.0, 0.0)


def words(ids: Iterable[int]) -> str:
    """Return token ids as text."""
    return " ".join(map(str, ids))


def test_a_node_is_used_by_the_requests_that_have_its_first_block_at_its_place() -> None:
    records = [record("blue", 1, 2, 3), record("red", 1, 2, 4), record("blue", 2, 1)]
    trunk, leaf, strange = uses(
        [node(1, blocks=2, depth=2), node(4, blocks=1, depth=3), node(9, blocks=1, depth=1)], records
    )
    assert (trunk.tenants, leaf.tenants, strange.tenants) == (["blue", "red"], ["red"], [])
    assert (trunk.models, trunk.text) == (leaf.models, None)


def test_its_text_begins_where_the_node_begins_and_is_bounded() -> None:
    kept = KeptPrompts(words)
    hashes = range(1, 101)
    kept.keep("r", pack_u32(range(200)), pack_u64(hashes))
    short, long = uses([node(2, blocks=1, depth=2), node(3, blocks=98, depth=100)], [record("", *hashes)], kept)
    assert short.text == "2 3"
    assert long.text == words(range(4, 4 + EXCERPT_TOKENS))


def pack_u32(ids: Iterable[int]) -> bytes:
    """Return token ids as they are kept."""
    return b"".join(each.to_bytes(4, "little") for each in ids)
