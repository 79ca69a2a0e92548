"""Embeddings that are kept: the cache, and the offers that wait to be fetched; both within their bytes."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_agent.media.embedding_transfer import OFFERS_MAX, EmbeddingCache, NoRoom, Offers


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache = EmbeddingCache(0)
    cache.put("a", b"1")
    assert cache.get("a") is None
    assert cache.size_bytes == 0


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


def test_an_offer_is_given_once() -> None:
    offers: Offers[bytes] = Offers(10, 5)
    offers.offer("a", b"123", 0)
    assert [offers.take("a", 1), offers.take("a", 1), offers.take("b", 1)] == [b"123", None, None]
    assert (offers.taken_total, offers.size_bytes) == (1, 0)


def test_an_offer_waits_no_longer_than_its_time() -> None:
    offers: Offers[bytes] = Offers(10, 5)
    offers.offer("a", b"123", 0)
    offers.offer("b", b"123", 2)
    assert (offers.take("a", 5), offers.take("b", 5)) == (None, b"123")
    assert offers.expire(5) == [b"123"]
    assert offers.expired_total == 1


def test_who_frees_expired_data_is_given_all_of_it() -> None:
    offers: Offers[bytes] = Offers(10, 5)
    offers.offer("a", b"123", 0)
    offers.take("b", 6)
    with pytest.raises(NoRoom):
        offers.offer("c", bytes(8), 6)
    assert offers.expire(6) == [b"123"]


def test_without_room_an_offer_is_refused_and_those_that_wait_stay() -> None:
    offers: Offers[bytes] = Offers(10, 5)
    offers.offer("a", bytes(6), 0)
    with pytest.raises(NoRoom, match="found 5 bytes beside 6 in 1 offers, allowed 10"):
        offers.offer("b", bytes(5), 1)
    offers.offer("c", bytes(4), 1)
    assert (len(offers), offers.refused_total) == (2, 1)


def test_what_was_released_or_expired_makes_room() -> None:
    offers: Offers[bytes] = Offers(10, 5)
    offers.offer("a", bytes(10), 0)
    offers.release("a")
    offers.release("a")
    offers.offer("b", bytes(10), 1)
    offers.expire(6)
    offers.offer("c", bytes(10), 6)
    assert (offers.released_total, offers.expired_total, offers.size_bytes) == (1, 1, 10)


def test_small_offers_are_bounded_in_number() -> None:
    offers: Offers[bytes] = Offers(1 << 20, 5)
    for at in range(OFFERS_MAX):
        offers.offer(str(at), b"1", 0)
    with pytest.raises(NoRoom):
        offers.offer("one more", b"1", 0)
