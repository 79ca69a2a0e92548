"""Every row of the table of trust."""

import pytest

from router.fleet.trust import Disparity, trust_of

BLOCK_SIZE = Disparity("block_size", 32, 16)
TOKENIZER = Disparity("tokenizer_digest", "x", "y")


@pytest.mark.parametrize(
    ("stale", "state", "reason"),
    [
        ("", "EXACT", ""),
        ("behind", "DEGRADED", "behind"),
        ("resyncing", "DEGRADED", "resyncing"),
        ("source", "DEGRADED", "source"),
        ("overfull", "DEGRADED", "overfull"),
        ("log_away", "DEGRADED", "event log away"),
        ("never_heard", "FALLBACK", "no KV events heard; approximate"),
        ("refused", "FALLBACK", "no room in the index; approximate"),
    ],
)
def test_trust_follows_the_stream(stale: str, state: str, reason: str) -> None:
    trust = trust_of((), stale)
    assert trust == (state, reason)
    assert trust.overlap_source == ("approximate" if state == "FALLBACK" else "index")


@pytest.mark.parametrize("stale", ["", "behind", "never_heard", "log_away"])
def test_where_parity_is_broken_the_stream_has_no_say_and_every_field_is_named(stale: str) -> None:
    trust = trust_of((BLOCK_SIZE, TOKENIZER), stale)
    differences = "block_size: found 32, allowed 16; tokenizer_digest: found 'x', allowed 'y'"
    assert trust == ("FALLBACK", f"{differences}; approximate")
    assert trust.overlap_source == "approximate"
