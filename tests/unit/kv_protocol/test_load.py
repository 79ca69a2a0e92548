import json
from typing import Any

import pytest

from kv_protocol.errors import MalformedMessage
from kv_protocol.journal import LoadApplied, decode_journal, encode_record, pack_journal
from kv_protocol.load import COUNT_MAX, LoadReport, PhaseLoad, decode_load, encode_load

LEAST: dict[str, Any] = {
    "instance": "i",
    "iteration": 1,
    "running_requests": 2,
    "waiting_requests": 3,
    "used_blocks": 4,
    "total_blocks": 5,
}
FULL: dict[str, Any] = LEAST | {"context_tokens": 6, "iteration_s": 0.012}
COUNTS = [field for field, value in FULL.items() if isinstance(value, int)]


PHASES = PhaseLoad(context_requests=1, paused_requests=0)


@pytest.mark.parametrize("fields", [LEAST, LEAST | dict.fromkeys(COUNTS, COUNT_MAX), FULL | {"phases": PHASES}])
def test_a_report_survives_the_wire_and_the_journal(fields: dict[str, Any]) -> None:
    report = LoadReport(**fields)
    assert decode_load(encode_load(report)) == report
    applied = LoadApplied(now_s=1.5, worker_id="w", dp_rank=0, report=report)
    assert decode_journal(pack_journal(1, 1, 1, encode_record(applied))).records == (applied,)


def test_a_figure_of_a_phase_that_is_not_known_is_not_sent() -> None:
    sent = json.loads(encode_load(LoadReport(**FULL, phases=PHASES)))
    assert sent["phases"] == {"context_requests": 1, "paused_requests": 0}


def test_a_report_of_an_old_engine_has_no_context_figures() -> None:
    report = decode_load(json.dumps(LEAST).encode())
    assert (report.context_tokens, report.iteration_s) == (0, 0.0)


def test_a_count_beyond_what_sums_of_a_ledger_hold_is_refused_by_its_name() -> None:
    for field in (*COUNTS, *PhaseLoad.__struct_fields__):
        for value in (-1, COUNT_MAX + 1, 2**63, 10**30):
            told = {field: value} if field in COUNTS else {"phases": {field: value}}
            with pytest.raises(MalformedMessage, match=rf"load report: Expected `int` .*{field}`"):
                decode_load(json.dumps(FULL | told).encode())


def test_an_iteration_takes_no_negative_time() -> None:
    with pytest.raises(MalformedMessage, match=r"load report: Expected `float` >= 0.0 - at `\$.iteration_s`"):
        decode_load(json.dumps(FULL | {"iteration_s": -1e300}).encode())
