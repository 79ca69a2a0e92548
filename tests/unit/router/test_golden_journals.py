"""Decisions that were recorded once come out again bit for bit: a cost that changes is noticed, and told in words.

If the change is meant, `python -m tests.golden.make_journals` writes the journals again, and CHANGELOG.md says what a
replay of journals of former versions finds. Otherwise journals of running routers would no longer replay.
"""

import gzip
import re
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kv_protocol.decided import Decided
from kv_protocol.journal import JournalRecord, PolicyChanged, decode_journal
from tests.golden.make_journals import JOURNALS
from tests.support.paths import RECORDINGS
from tests.support.replayed import replay

SHOWN_MAX = 8


def recorded(name: str) -> Sequence[JournalRecord]:
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
    found = differences(recorded(name))
    told = "\n".join(found[:SHOWN_MAX])
    assert not found, f"{len(found)} decisions of {name} differ; the first:\n{told}"


def test_a_planted_change_of_a_cost_is_told_with_its_rank_its_term_and_both_values() -> None:
    def dearer(record: JournalRecord) -> JournalRecord:
        if not isinstance(record, PolicyChanged):
            return record
        weights = {**record.policy["parameters"], "ttft_weight": 2 * record.policy["parameters"]["ttft_weight"]}
        return replace(record, policy={**record.policy, "parameters": weights})

    found = differences([dearer(record) for record in recorded("journal_kv.msgpack.gz")])
    assert len(found) > 5
    assert any(re.search(r"^d\d+\+*: .*\bw\d/\d: cost now \d+\.\d+, recorded \d+\.\d+", each) for each in found)
