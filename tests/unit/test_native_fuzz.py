"""The inputs of the fuzzers mean the same to every implementation, and a wrong one is found by them."""

import pytest
from typing_extensions import Buffer

from indexer.index.buffers import checked_hashes
from indexer.index.prefix_index import Hashes, RefusedEvent
from indexer.index.reference import ReferenceIndex
from indexer.native.fuzz.agreement import differences
from indexer.native.fuzz.programs import MakeIndex
from indexer.native.fuzz.seeds import FUZZERS, inputs
from kv_protocol.events import Tier


class RemovesOneLess(ReferenceIndex):
    def remove(self, rank: int, sequence_hashes: Hashes, tier: Tier) -> None:
        super().remove(rank, checked_hashes(sequence_hashes)[1:], tier)


class ClearsAllTiers(ReferenceIndex):
    def clear(self, rank: int, tier: Tier | None = None) -> None:
        del tier
        super().clear(rank)


class ForgetsARefusal(ReferenceIndex):
    def apply_batch(self, rank: int, message: Buffer, now_s: float) -> list[RefusedEvent]:
        return super().apply_batch(rank, message, now_s)[1:]


class KeepsWhatItHad(ReferenceIndex):
    def restore(self, data: Buffer, now_s: float) -> None:
        known = len(self.children(None))
        if not known:
            super().restore(data, now_s)
            self.register(7)


def native() -> MakeIndex:
    return pytest.importorskip("indexer.native.index").NativeIndex  # type: ignore[no-any-return]


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_the_native_index_does_with_them_what_the_python_index_does(fuzzer: str) -> None:
    made = native()
    found = {at: differences(fuzzer, data, ReferenceIndex, made) for at, data in enumerate(inputs(fuzzer))}
    assert {at: what for at, what in found.items() if what} == {}


@pytest.mark.parametrize("fuzzer", FUZZERS)
def test_the_same_index_agrees_with_itself(fuzzer: str) -> None:
    assert [differences(fuzzer, data, ReferenceIndex, ReferenceIndex) for data in inputs(fuzzer)[:9]] == [[]] * 9


@pytest.mark.parametrize(
    ("fuzzer", "wrong"),
    [
        ("apply_batch", RemovesOneLess),
        ("apply_batch", ClearsAllTiers),
        ("apply_batch", ForgetsARefusal),
        ("restore", KeepsWhatItHad),
    ],
)
@pytest.mark.planted
def test_a_wrong_index_is_found(fuzzer: str, wrong: MakeIndex) -> None:
    assert any(differences(fuzzer, data, ReferenceIndex, wrong) for data in inputs(fuzzer))
