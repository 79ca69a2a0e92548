"""What every prefix index takes, whatever the form."""

from array import array
from collections.abc import Callable

import pytest

from indexer.index.prefix_index import RANK_MAX, Hashes, PrefixIndex
from kv_protocol.codec import encode_message, pack_u64
from kv_protocol.events import TIERS, Batch, Stored
from tests.contract.indexes import GPU, HOST, U64_MAX, both, chain, held, overlaps

PATH = [*chain(3), 0, U64_MAX]
MESSAGE = encode_message([Batch(1, 1, Stored((1,)))])


@pytest.mark.parametrize("form", [list, tuple, pack_u64])
def test_hashes_come_as_numbers_or_packed(index: PrefixIndex, form: Callable[[list[int]], Hashes]) -> None:
    index.store(0, None, form(PATH), GPU, 0)
    assert list(held(index, 0)) == PATH
    assert overlaps(index, form(PATH)) == {0: both(5)}
    index.remove(0, form(PATH[1:]), GPU)
    assert overlaps(index, form(PATH)) == {0: both(1)}


@pytest.mark.parametrize("rank", [3, RANK_MAX, RANK_MAX + 1])
def test_an_unknown_rank_is_a_key_error_and_dropping_it_is_nothing(index: PrefixIndex, rank: int) -> None:
    index.store(0, None, PATH, GPU, 0)
    before = index.snapshot(), index.statistics(), index.overfull()
    for ask in (
        lambda: index.store(rank, None, PATH, GPU, 0),
        lambda: index.store(rank, 77, [1], GPU, 0),
        lambda: index.remove(rank, PATH, GPU),
        lambda: index.clear(rank),
        lambda: index.clear(rank, GPU),
        lambda: index.load(rank, [], 0),
        lambda: index.repair(rank, bytes(32), [], 0),
        lambda: index.apply_batch(rank, MESSAGE, 0),
        lambda: index.digest(rank, GPU),
        lambda: index.bucket_digests(rank, GPU),
        lambda: index.dump(rank),
    ):
        with pytest.raises(KeyError):
            ask()
    index.drop(rank)
    assert (index.snapshot(), index.statistics(), index.overfull()) == before


def test_every_number_of_the_rows_is_written(index: PrefixIndex) -> None:
    index.store(2, None, PATH, HOST, 0)
    index.store(0, None, PATH[:2], GPU, 0)
    for columns in (3, 4, 70):
        out = array("i", [-7] * 4 * columns)
        assert index.match(PATH, out) == 5
        rows = [list(out[tier * columns : (tier + 1) * columns]) for tier in TIERS]
        rest = [0] * (columns - 3)
        assert rows == [[2, 0, 0, *rest], [2, 0, 5, *rest], [2, 0, 5, *rest], [2, 0, 5, *rest]]
    assert index.match([404], out) == 0
    assert set(out) == {0}
