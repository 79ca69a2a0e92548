"""What routers and agents say, read; and what is no such page."""

import msgspec
import pytest

from router.doctor.facts import LOSSES, WATCHED, ParityBroken, RankStatus
from router.doctor.pages import PageUnreadable, PolicyPage, Workers, counts, decoded, unhealthy
from router.doctor.survey import reads_overlap
from tests.unit.router.samples import registered

PAGE = b"""# HELP kvrouter_rejected_total Requests refused for load
# TYPE kvrouter_rejected_total counter
kvrouter_rejected_total{reason="queue_full"} 3.0
kvrouter_rejected_total{reason="timeout"} 4.0
kvrouter_rejected_totally_other 9.0
kvrouter_queued_requests 2.0
kvrouter_workers 5.0
"""


def test_metrics_are_summed_and_kept_by_label() -> None:
    assert counts(PAGE, WATCHED) == {
        "kvrouter_rejected_total": 7.0,
        "kvrouter_rejected_total{queue_full}": 3.0,
        "kvrouter_rejected_total{timeout}": 4.0,
        "kvrouter_queued_requests": 2.0,
    }
    assert counts(PAGE, LOSSES) == {}


@pytest.mark.parametrize("page", [b"", b"\xff\xfe", b"kvrouter_queued_requests many\n", b'{"no": "page"}'])
def test_an_unreadable_page_has_no_metrics(page: bytes) -> None:
    assert counts(page, WATCHED) == {}


def test_workers_are_read_with_their_ranks_and_differences() -> None:
    body = msgspec.json.encode(
        {
            "workers": [
                {
                    "registration": registered("w0"),
                    "ranks": [{"worker_id": "w0", "dp_rank": 0, "trust": "FALLBACK", "trust_reason": "r", "unfit": ""}],
                    "differs": [{"field": "block_size", "found": 32, "allowed": 16}],
                    "of_a_newer_version": 1,
                }
            ]
        }
    )
    workers = decoded(body, Workers, "/v1/workers")
    assert workers.statuses() == (RankStatus("w0", 0, "FALLBACK", "r", ""),)
    assert workers.broken() == (ParityBroken("w0", "block_size", "16", "32"),)


def test_a_page_that_is_another_says_of_what_and_why() -> None:
    with pytest.raises(PageUnreadable, match=r"/v1/workers: .*workers"):
        decoded(b'{"data": []}', Workers, "/v1/workers")


def test_foreign_engines_may_say_anything() -> None:
    pages = (b"<html>", b"[1]", b'{"status": "failed", "reason": "dead"}')
    assert [*map(unhealthy, pages)] == ["", "", "dead"]


def test_a_mode_of_any_phase_counts_and_a_user_s_is_assumed_to_read_overlap() -> None:
    policy = decoded(
        b'{"mode": "random", "prefill": {"mode": "kv"}, "decode": {"mode": null}}', PolicyPage, "/v1/policy"
    )
    assert policy.modes() == ("random", "kv")
    assert [reads_overlap(mode) for mode in ("kv", "round-robin", "direct", "mine:mode")] == [True, False, False, True]
