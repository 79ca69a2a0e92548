"""The cache of embeddings, within its bytes."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.api.encode_endpoint import EmbeddingCache


@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef"), st.integers(0, 9)), max_size=60), st.integers(0, 20)
)
def test_it_holds_what_a_list_by_last_use_would(turns: list[tuple[bool, str, int]], bytes_max: int) -> None:
    cache, model = EmbeddingCache(bytes_max), OrderedDict[str, bytes]()
    for is_put, digest, size in turns:
        if is_put:
            cache.put(digest, bytes(size))
            model.pop(digest, None)
            if size <= bytes_max:
                model[digest] = bytes(size)
            while sum(map(len, model.values())) > bytes_max:
                model.popitem(last=False)
        else:
            assert cache.get(digest) == model.get(digest)
            if digest in model:
                model.move_to_end(digest)
        assert cache.size_bytes == sum(map(len, model.values())) <= bytes_max
