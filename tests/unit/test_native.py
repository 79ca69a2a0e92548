"""The extension is built, and serves."""

import pytest

from indexer.native import extension, load
from indexer.native.index import NativeIndex
from kv_protocol.events import Tier
from router import native as router_native


def test_it_is_there() -> None:
    assert load() is extension()


def test_its_index_serves() -> None:
    index = NativeIndex()
    index.register(3)
    index.store(3, None, (1, 2), Tier.GPU, 0.0)
    assert index.overlaps((1, 2, 9)) == {3: (2, 2, 2, 2)}


def test_the_routers_is_there() -> None:
    assert router_native.load() is not None


def test_one_of_other_sources_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_native, "INTERFACE", router_native.INTERFACE + 1)
    assert router_native.load.__wrapped__() is None
