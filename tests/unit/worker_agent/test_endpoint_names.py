"""Endpoint names: three parts, with or without `dyn://`, and a default for each role."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_protocol.errors import LimitExceeded
from worker_agent.fleet.endpoint_names import EndpointName, endpoint_name

PARTS = st.text("abcXYZ019_-", min_size=1, max_size=64)


@given(PARTS, PARTS, PARTS)
def test_a_name_reads_as_its_three_parts_whatever_stands_before_it(namespace: str, component: str, end: str) -> None:
    name = EndpointName(namespace, component, end)
    assert endpoint_name(str(name)) == endpoint_name(f"dyn://{name}") == name


@pytest.mark.parametrize(
    "text",
    ["", "dyn://", "a.b", "a.b.c.d", "a..c", ".a.b", "a.b.c ", "a b.c.d", "http://a.b.c", "dyn://dyn://a.b.c", "ä.b.c",
     f"a.b.{'c' * 65}", "a.b.c\n"],
)  # fmt: skip
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(LimitExceeded, match=r"endpoint: found .*, allowed namespace\.component\.endpoint"):
        endpoint_name(text)
