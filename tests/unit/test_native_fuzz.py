"""The inputs of the fuzzers mean the same to every implementation, and a wrong one is found by them."""

import pytest

from kv_protocol.events import Tier
from tests.contract.indexes import MakeIndex
from tests.fuzz.agreement import differences
from tests.fuzz.seeds import FUZZERS, inputs
from tests.reference.index.index import ReferenceIndex


class ClearsAllTiers(ReferenceIndex):
    def clear(self, rank: int, tier: Tier | None = None) -> None:
        del tier
        super().clear(rank)


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


@pytest.mark.planted
def test_a_wrong_index_is_found() -> None:
    assert any(differences("apply_batch", data, ReferenceIndex, ClearsAllTiers) for data in inputs("apply_batch"))
