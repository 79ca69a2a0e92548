"""The extension is built, and computes what its Python twin computes."""

from hypothesis import given
from hypothesis import strategies as st

from indexer.native import load
from kv_protocol.codec import pack_u64
from kv_protocol.digest import SetDigest

hashes = st.sets(st.integers(0, 2**64 - 1), max_size=50)


def test_it_is_built() -> None:
    assert load() is not None


@given(hashes)
def test_its_digest_is_the_protocols(members: set[int]) -> None:
    core = load()
    assert core is not None
    assert core.set_digest(pack_u64(list(members))) == SetDigest(members).total
