"""The extension is built, and serves."""

from indexer.native import extension, load
from indexer.native.index import NativeIndex
from kv_protocol.events import Tier


def test_it_is_there() -> None:
    assert load() is extension()


def test_its_index_serves() -> None:
    index = NativeIndex()
    index.register(3)
    index.store(3, None, (1, 2), Tier.GPU, 0.0)
    assert index.overlaps((1, 2, 9)) == {3: (2, 2, 2, 2)}
