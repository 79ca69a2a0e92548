"""Slurm's list of hosts, in full."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.errors import LimitExceeded
from worker_agent.engines.trtllm.slurm_nodes import HOSTS_MAX, expanded


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("", ""),
        ("login", "login"),
        ("a,b", "a b"),
        ("n[1-3,7]", "n1 n2 n3 n7"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[5,4,011-012]", "n5 n4 n011 n012"),
        ("gpu-a100[01-02].cluster", "gpu-a10001.cluster gpu-a10002.cluster"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("d[1-2],n[01-02],login", "d1 d2 n01 n02 login"),
        ("n[3]", "n3"),
        ("n[2,2]", "n2 n2"),
    ],
)
def test_a_list_is_its_hosts_in_their_order(nodelist: str, hosts: str) -> None:
    assert expanded(nodelist) == tuple(hosts.split())


@pytest.mark.parametrize(
    "nodelist",
    [
        *(",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1", "n[1-]", "n[-1]", "n[3-1]", "n[1--2]", "n[1,]", "n[a]"),
        *("n[1[2]]", "a b", "a\n", "n(2)", "é", "a;b", "n[1-2-3]", "n[1234567890]"),
    ],
)
def test_what_is_no_list_is_refused_with_what_was_found(nodelist: str) -> None:
    with pytest.raises(LimitExceeded, match=r"^SLURM_STEP_NODELIST: found "):
        expanded(nodelist)


@pytest.mark.parametrize(
    "nodelist", ["n[0-4096]", "n[000000000-999999999]", "a[0-99]b[0-99]", ",".join(["n"] * 4097), "n" * 65_537]
)
def test_more_hosts_than_any_worker_has_ranks_are_refused_before_they_are_made(nodelist: str) -> None:
    with pytest.raises(LimitExceeded, match="allowed at most"):
        expanded(nodelist)


def test_as_many_hosts_as_a_worker_may_have_ranks_are_a_list() -> None:
    assert len(expanded("n[0-4095]")) == HOSTS_MAX


texts = st.text("abz019._-", min_size=1, max_size=5)
ranges = st.tuples(st.integers(0, 2000), st.integers(0, 6), st.integers(1, 5))


def spelled(first: int, more: int, width: int) -> tuple[str, list[str]]:
    """Return a range as Slurm writes it, and its numbers as it means them."""
    written = str(first).zfill(width)
    numbers = [str(number).zfill(len(written)) for number in range(first, first + more + 1)]
    return (f"{written}-{first + more}" if more else written), numbers


@given(st.lists(st.tuples(texts, st.lists(ranges, max_size=3), texts), min_size=1, max_size=4))
def test_whatever_is_written_short_is_read_in_full(groups: list[tuple[str, list[tuple[int, int, int]], str]]) -> None:
    nodelist, hosts = [], []
    for head, numbers, tail in groups:
        both = [spelled(*each) for each in numbers]
        nodelist.append(head + (f"[{','.join(short for short, _ in both)}]" if both else "") + tail)
        middles = list(chain.from_iterable(full for _, full in both)) if both else [""]
        hosts += [f"{head}{middle}{tail}" for middle in middles]
    assert expanded(",".join(nodelist)) == tuple(hosts)


@given(st.text("n[]0-,1 a", max_size=12))
def test_any_text_is_a_list_of_hosts_or_refused(text: str) -> None:
    try:
        hosts = expanded(text)
    except LimitExceeded:
        return
    assert all(host and not set(host) & set("[], ") for host in hosts)
