import re
from collections.abc import Callable
from functools import partial

import pytest

from kv_protocol import subjects
from kv_protocol.errors import LimitExceeded, MalformedMessage
from kv_protocol.ids import (
    BLOCK_SIZE_MAX,
    DP_RANK_MAX,
    WorkerRank,
    checked_block_size,
    checked_dp_rank,
    checked_u64,
    checked_worker_id,
)

OF_RANK = [subjects.events, subjects.heartbeat, subjects.load, subjects.recover]
Subject = Callable[[str, WorkerRank], str]
ODD_MODELS = [
    "",
    " ",
    ".",
    "*",
    ">",
    "meta-llama/Llama-3.1-8B-Instruct",
    "a.b.c",
    "org/model:v1.2@sha256",
    "模型",
    "Ünïcode",
    "emoji 🦙",
    "new\nline",
    "nul\0",
    "-",
    "--lead-and-trail--",
    "x" * 500,
    "x" * 47 + "-y",
    "$SYS.REQ",
]


def test_any_model_name_becomes_one_token_of_a_subject_of_its_own() -> None:
    slugs = [subjects.model_slug(model) for model in ODD_MODELS]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,47}-[0-9a-f]{8}", slug) for slug in slugs), slugs
    assert len(set(slugs)) == len(ODD_MODELS)


def test_the_subjects_are_those_of_the_interface() -> None:
    rank = WorkerRank("w-1", 2)
    slug = subjects.model_slug("Org/M")
    assert re.fullmatch(r"org-m-[0-9a-f]{8}", slug)
    assert [subject("Org/M", rank) for subject in OF_RANK] == [
        f"kv.v1.events.{slug}.w-1.2",
        f"kv.v1.heartbeat.{slug}.w-1.2",
        f"kv.v1.load.{slug}.w-1.2",
        f"kv.v1.recover.{slug}.w-1.2",
    ]
    assert subjects.fleet("Org/M", "w-1") == f"kv.v1.fleet.{slug}.w-1"
    assert subjects.journal("router-1") == "kv.v1.journal.router-1"


def test_a_subscription_to_all_of_a_kind_hears_each() -> None:
    rank = WorkerRank("w", 0)
    for subject, pattern in (
        (subjects.events("m", rank), subjects.EVENTS_ALL),
        (subjects.heartbeat("m", rank), subjects.HEARTBEAT_ALL),
        (subjects.load("m", rank), subjects.LOAD_ALL),
        (subjects.fleet("m", "w"), subjects.FLEET_ALL),
        (subjects.journal("r"), subjects.JOURNAL_ALL),
    ):
        assert pattern.endswith(".>")
        assert subject.startswith(pattern[:-1])


@pytest.mark.parametrize("subject", OF_RANK)
def test_the_rank_is_read_back_from_its_subject(subject: Subject) -> None:
    for rank in (WorkerRank("w", 0), WorkerRank("z" * 64, DP_RANK_MAX), WorkerRank("-", 10)):
        assert {subjects.rank_of(subject(model, rank)) for model in ODD_MODELS} == {rank}


@pytest.mark.parametrize("subject", OF_RANK)
def test_a_rank_that_would_break_a_subject_is_refused(subject: Subject) -> None:
    for rank, field in ((WorkerRank("a.b", 0), "worker_id"), (WorkerRank("w", DP_RANK_MAX + 1), "dp_rank")):
        with pytest.raises(LimitExceeded, match=rf"^{field}: "):
            subject("m", rank)


def test_a_worker_or_router_that_would_break_a_subject_is_refused() -> None:
    for subject in (partial(subjects.fleet, "m"), subjects.journal, subjects.ledger_of):
        with pytest.raises(LimitExceeded, match=r"^worker_id: "):
            subject("a.b")


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "kv.v1.events.m.w",
        "kv.v1.fleet.m.w",
        "kv.v1.events.m.w.0.0",
        "kv.v1.events.m.w.",
        "kv.v1.events.m.w.-1",
        "kv.v1.events.m.w.x",
        "kv.v1.events.m.w.1 ",
        "kv.v1.events.m.w.1\n",
        "kv.v1.events.m.w.007",  # another spelling of a rank would be another key
        "kv.v1.events.m.w.\u0663",  # a decimal digit, but not one of ours
        f"kv.v1.events.m.w.{DP_RANK_MAX + 1}",
        "kv.v1.events.m.w." + "9" * 5000,
        "kv.v1.events.m..0",
        "kv.v1.events.m.W.0",
        "kv.v1.events.m.*.0",
        "kv.v1.events.m." + "z" * 65 + ".0",
        "kv.v1.events..w.0",
        "kv.v2.events.m.w.0",
        "a.b.c.d.w.0",
    ],
    ids=lambda subject: repr(subject)[:40],
)
def test_a_subject_that_names_no_rank_is_refused(subject: str) -> None:
    with pytest.raises(MalformedMessage, match=r"allowed kv\.v1\.<kind>\.<model>\.<worker>\.<rank>"):
        subjects.rank_of(subject)


def test_a_pattern_is_of_all_or_of_whom_is_named() -> None:
    rank = WorkerRank("w-1", 2)
    slug = subjects.model_slug("m")
    assert subjects.pattern("events") == "kv.v1.events.*.*.*"
    assert subjects.pattern("events", slug=slug) == f"kv.v1.events.{slug}.*.*"
    named = subjects.pattern("heartbeat", slug=slug, worker_id="w-1", dp_rank=2)
    assert named == subjects.heartbeat("m", rank)
    assert subjects.pattern("events", worker_id="w-1", dp_rank=0) == "kv.v1.events.*.w-1.0"
    assert subjects.pattern("fleet", slug=slug, worker_id="w-1", dp_rank=2) == subjects.fleet("m", "w-1")
    assert subjects.pattern("fleet") == "kv.v1.fleet.*.*"


def test_a_worker_id_of_lower_case_digits_and_dashes_may_stand_in_a_subject() -> None:
    for worker_id in ("a", "0", "-", "worker-07", "z" * 64):
        assert checked_worker_id(worker_id) == worker_id
    for worker_id in (
        "",
        "z" * 65,
        "W",
        "a.b",
        "a b",
        "a_b",
        "a/b",
        "*",
        ">",
        "a\n",
        "\na",
        "é",
        "\u0661",
        "\u212a",
        "a\0",
    ):
        with pytest.raises(LimitExceeded, match=r"^worker_id: found ") as refused:
            checked_worker_id(worker_id)
        assert (refused.value.field, refused.value.found) == ("worker_id", worker_id)


def test_both_ends_of_a_range_belong_to_it_and_a_value_beyond_is_refused_by_name() -> None:
    checks: list[tuple[str, Callable[[int], int], int, int]] = [
        ("dp_rank", checked_dp_rank, 0, DP_RANK_MAX),
        ("block_size", checked_block_size, 1, BLOCK_SIZE_MAX),
        ("epoch", partial(checked_u64, "epoch"), 0, 2**64 - 1),
    ]
    for field, check, least, most in checks:
        assert (check(least), check(most)) == (least, most)
        for value in (least - 1, most + 1):
            with pytest.raises(LimitExceeded, match=rf"^{field}: found {value}, allowed ") as refused:
                check(value)
            assert (refused.value.field, refused.value.found) == (field, value)
