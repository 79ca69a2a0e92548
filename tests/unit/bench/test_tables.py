"""The figures of a bench's rounds."""

from bench.tables import Rounds


def test_a_ratio_compares_figures_of_the_same_round_if_a_round_lacks_one() -> None:
    found = Rounds()
    for ours, peer in (({"us": 1.0}, {"us": 2.0}), ({}, {"us": 30.0}), ({"us": 100.0}, {"us": 200.0})):
        found.add("ours", "small", ours)
        found.add("peer", "small", peer)
    assert found.ratio("small", "us", "peer", "ours") == 2.0
    assert found.ratio("small", "us", "ours", "peer") == 0.5


def test_a_ratio_leaves_out_rounds_that_would_divide_by_zero() -> None:
    found = Rounds()
    for ours in (0.0, 4.0):
        found.add("ours", "small", {"us": ours})
        found.add("peer", "small", {"us": 8.0})
    assert found.ratio("small", "us", "peer", "ours") == 2.0
    assert found.ratio("small", "us", "peer", "absent") is None
