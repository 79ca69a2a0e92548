"""The bound, against a cache that is written down without any cleverness."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bench.routing.lru_bound import LruCache, lru_hit_rate

PARENTS = {1: 0, 2: 1, 3: 2, 4: 2, 5: 1, 6: 0, 7: 6, 8: 7, 9: 0}
"""A small tree of blocks; 0 is no block."""


def path(block: int) -> list[int]:
    return [] if block == 0 else [*path(PARENTS[block]), block]


class SlowLru:
    """Every block with the time of its last use; a block's time is always less than its parent's."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self.used_at: dict[int, int] = {}
        self.now = 0

    def take(self, hashes: Sequence[int], reusable_blocks: int) -> int:
        hit = 0
        while hit < min(reusable_blocks, len(hashes)) and hashes[hit] in self.used_at:
            hit += 1
        for depth, each in enumerate(hashes):
            self.used_at[each] = self.now + len(hashes) - depth
        self.now += len(hashes) + 1
        while len(self.used_at) > self.blocks_max:
            del self.used_at[min(self.used_at, key=self.used_at.__getitem__)]
        return hit


@given(
    leaves=st.lists(st.tuples(st.sampled_from(sorted(PARENTS)), st.integers(0, 5)), max_size=60),
    blocks_max=st.integers(1, 9),
)
def test_the_cache_gives_what_a_plain_one_gives(leaves: list[tuple[int, int]], blocks_max: int) -> None:
    fast, slow = LruCache(blocks_max), SlowLru(blocks_max)
    taken = [(path(leaf), reusable) for leaf, reusable in leaves]
    assert [fast.take(*each) for each in taken] == [slow.take(*each) for each in taken]


def test_the_rate_is_of_prompt_tokens_and_the_last_token_is_never_cached() -> None:
    prompts = [(32, (1, 2)), (32, (1, 2)), (36, (1, 2))]
    assert lru_hit_rate(prompts, blocks_max=9, block_size=16) == (0 + 16 + 32) / 100
