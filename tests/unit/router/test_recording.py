"""What the journal has of a decision, and that decisions that were recorded once come out again bit for bit."""

import gzip
import random
import re
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from indexer.follow.status import StaleReason
from kv_protocol.decided import Decided, RouteRequest, best_columns, best_terms, other_costs, overlap_depths
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import (
    JournalRecord,
    PolicyChanged,
    RankStanding,
    decode_journal,
    encode_record,
    pack_journal,
)
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.verdict import Verdict
from router.decision.view import RateColumns
from router.fleet.trust import Trust, doubt_of, trust_of
from router.journal.encoder import JournalEncoder
from tests.golden.make_journals import JOURNALS
from tests.support.amount import examples
from tests.support.decide import View, decide
from tests.support.paths import RECORDINGS
from tests.support.replayed import replay
from tests.support.watched_routing import Told, tell
from tests.unit.router.samples import BLOCK_SIZE, MODEL, registered

SHOWN_MAX = 8


def recorded_in(name: str) -> Sequence[JournalRecord]:
    """Return the records of a golden journal."""
    return decode_journal(gzip.decompress((RECORDINGS / name).read_bytes())).records


def differences(records: Sequence[JournalRecord]) -> list[str]:
    """Return a line for each decision of the journal that comes out otherwise."""
    again = list(replay(records))
    assert sum(isinstance(record, Decided) and bool(record.best) for record in records) > 20
    assert all(each.is_exact for each in again)
    return [f"{each.decision_id}: {each.difference}" for each in again if not each.equal]


@pytest.mark.parametrize("name", JOURNALS)
def test_every_decision_of_a_golden_journal_is_taken_again_bit_for_bit(name: str) -> None:
    found = differences(recorded_in(name))
    told = "\n".join(found[:SHOWN_MAX])
    assert not found, f"{len(found)} decisions of {name} differ; the first:\n{told}"


def test_a_planted_change_of_a_cost_is_told_with_its_rank_its_term_and_both_values() -> None:
    def dearer(record: JournalRecord) -> JournalRecord:
        if not isinstance(record, PolicyChanged):
            return record
        weights = {**record.policy["parameters"], "ttft_weight": 2 * record.policy["parameters"]["ttft_weight"]}
        return replace(record, policy={**record.policy, "parameters": weights})

    found = differences([dearer(record) for record in recorded_in("journal_kv.msgpack.gz")])
    assert len(found) > 5
    assert any(re.search(r"^d\d+\+*: .*\bw\d/\d: cost now \d+\.\d+, recorded \d+\.\d+", each) for each in found)


def test_decisions_of_a_mode_that_is_not_known_here_are_not_called_different() -> None:
    modes = {name: mode for name, mode in MODES.items() if name != "kv"}
    again = list(replay(recorded_in("journal_kv.msgpack.gz"), modes=modes))
    unknown = [each for each in again if each.difference.startswith("mode kv is not known here")]
    assert len(unknown) > 20
    assert not any(each.is_exact for each in unknown)


RANKS, BLOCKS = 64, 128
DECISION_BYTES_MAX = 2200


def request(draw: random.Random, blocks: int = BLOCKS, **changed: Any) -> RouteRequest:
    told: dict[str, Any] = {
        "decision_id": draw.randbytes(16).hex(),
        "request_id": draw.randbytes(16).hex(),
        "model": MODEL,
        "isl_tokens": blocks * BLOCK_SIZE + 5,
        "block_size": BLOCK_SIZE,
        "sequence_hashes": draw.randbytes(8 * blocks),
        "max_tokens": 512,
        "tenant": "tenant-1",
    }
    return RouteRequest(**told | changed)


def view(draw: random.Random, ranks: int = RANKS, **changed: Any) -> Any:
    """Return a busy fleet: half of it holds some of the request, a few ranks on other tiers too."""
    names = [f"worker-{number}" for number in range(ranks)]
    held = np.array([draw.choice([0, draw.randrange(BLOCKS)]) for _ in names])
    deeper = np.array([draw.choice([0] * 4 + [draw.randrange(64)]) for _ in names])
    told: dict[str, Any] = {
        "now_s": draw.random() * 1e6,
        "turn": draw.randrange(10**6),
        "ranks": tuple(WorkerRank(name, 0) for name in names),
        "registrations": tuple(registered(name) for name in names),
        "unfit": tuple(draw.choice([""] * 9 + ["draining"]) for _ in names),
        "trust": (Trust("EXACT", ""),) * ranks,
        "overlap": np.array([held, held + deeper, held + deeper, held + deeper], dtype=np.int32),
        "predicted": np.array([draw.choice([0, 0, draw.randrange(BLOCKS)]) for _ in names]),
        "epochs": tuple(draw.getrandbits(64) for _ in names),
        "seqs": tuple(draw.randrange(10**6) for _ in names),
        "queued_tokens": np.array([draw.randrange(10**5) for _ in names]),
        "active_requests": np.array([draw.randrange(100) for _ in names]),
        "active_blocks": np.array([draw.randrange(10**4) for _ in names]),
        "shared_blocks": np.array([draw.randrange(BLOCKS) for _ in names]),
        "newcomer": (False,) * ranks,
        "rates": RateColumns(np.ones(ranks), np.ones(ranks), 128.0),
    }
    return View(**told | changed)


def verdict(seed: int, policy: Policy | None = None, **changed: Any) -> Verdict:
    draw = random.Random(seed)
    return decide(view(draw, **changed), request(draw), policy or Policy(), seed)


def only_decided(records: list[JournalRecord]) -> Decided:
    (found,) = [record for record in records if isinstance(record, Decided)]
    return found


def recorded(what: Told, encoder: JournalEncoder | None = None) -> list[JournalRecord]:
    """Return the records of `what` as a reader decodes them."""
    encoder = JournalEncoder(1, lambda: 7) if encoder is None else encoder
    tell(encoder, what)
    return [*decode_journal(encoder.cut().data).records]


@pytest.mark.parametrize("seed", range(20))
def test_a_decision_among_64_ranks_with_128_blocks_takes_some_2_kb_at_most(seed: int) -> None:
    policy = Policy(temperature=0.3 * (seed % 2))
    assert len(encode_record(only_decided(recorded(verdict(seed, policy))))) <= DECISION_BYTES_MAX


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ranks", [1, 2, 7, 8, 9, 64])
def test_every_candidate_is_recorded_with_its_terms_or_its_cost(seed: int, ranks: int) -> None:
    told = verdict(
        seed,
        Policy(temperature=0.5),
        ranks=ranks,
        unfit=("",) * (ranks - 1) + ("" if ranks < 3 else "away",),
    )
    found = only_decided(recorded(told))
    costs, candidates = told.cost_list(), told.rank_indices
    best = best_columns(found.best)
    assert best[0] == found.winner
    assert (found.rank, found.kv_seq, found.margin) == (told.winner, 7, told.margin)
    assert best_terms(found) == [told.terms(candidates.index(column)) for column in best]
    others = [at for at, place in enumerate(candidates) if place not in best]
    assert other_costs(found) == tuple(float(np.float32(costs[at])) for at in others)
    assert len(best) == min(8, len(candidates))
    dearest = max((costs[candidates.index(column)] for column in best[1:]), default=0.0)
    assert all(costs[at] >= dearest for at in others)


@given(st.integers(1, 80), st.integers(0, 2**32), st.sampled_from([3, 2**16 - 1, 2**20]))
@settings(max_examples=examples(60))
def test_any_overlap_is_read_as_it_was_packed(ranks: int, seed: int, most: int) -> None:
    draw = random.Random(seed)
    depths = [sorted(draw.choice([0, draw.randrange(most)]) for _ in range(4)) for _ in range(ranks)]
    overlap = np.array(depths, dtype=np.int32).T.copy()
    told = only_decided(recorded(verdict(0, ranks=ranks, unfit=("",) * ranks, overlap=overlap)))
    assert overlap_depths(told) == [tuple(each) for each in depths]


@pytest.mark.parametrize("doubt", get_args(StaleReason))
def test_a_doubt_is_found_again_from_the_trust_that_it_left(doubt: str) -> None:
    assert doubt_of(trust_of((), doubt), "before") == doubt


def test_of_a_rank_that_differs_the_doubt_stays_as_it_was() -> None:
    assert doubt_of(Trust("FALLBACK", "canary: found 1, allowed 2; approximate"), "behind") == "behind"


def test_a_ranks_standing_is_recorded_when_it_changed_and_not_again() -> None:
    encoder, ranks = JournalEncoder(1), 3
    epochs = (5, 5, 0)
    first = recorded(verdict(1, ranks=ranks, unfit=("",) * 3, epochs=epochs), encoder)
    assert [(each.worker_id, each.epoch, each.doubt) for each in first if isinstance(each, RankStanding)] == [
        ("worker-0", 5, ""), ("worker-1", 5, "")
    ]  # fmt: skip
    again = recorded(verdict(2, ranks=ranks, unfit=("",) * 3, epochs=(5, 5, 0)), encoder)
    assert [type(each) for each in again] == [Decided]
    doubted = (Trust("EXACT", ""), Trust("DEGRADED", "behind"), Trust("EXACT", ""))
    changed = recorded(verdict(3, ranks=ranks, unfit=("",) * 3, epochs=epochs, trust=doubted), encoder)
    assert [(each.worker_id, each.doubt) for each in changed if isinstance(each, RankStanding)] == [
        ("worker-1", "behind")
    ]
    epochs = (5, 6, 0)
    moved = recorded(verdict(4, ranks=ranks, unfit=("",) * 3, epochs=epochs, trust=doubted), encoder)
    assert [(each.worker_id, each.epoch) for each in moved if isinstance(each, RankStanding)] == [("worker-1", 6)]


def test_a_mode_that_reads_no_overlap_leaves_no_columns_and_no_standings() -> None:
    blank = {"epochs": (0,) * RANKS, "overlap": np.zeros((4, RANKS), dtype=np.int32)}
    (found,) = recorded(verdict(1, Policy(mode="round-robin"), **blank))
    assert isinstance(found, Decided)
    assert (found.best, found.terms, found.costs, found.overlap) == (b"", b"", b"", b"")


@pytest.mark.parametrize("seed", range(20))
def test_what_was_promised_is_found_again_in_the_bytes_of_its_decision(seed: int) -> None:
    told = verdict(seed)
    encoded = [encode_record(record) for record in recorded(told)]
    found = only_decided([*decode_journal(pack_journal(1, 1, len(encoded), *encoded)).records])
    assert found.promise == told.promise
    assert found.promise.lease_id == told.decision_id
