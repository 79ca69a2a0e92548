"""`router bench trace`, as it is typed."""

import json
from pathlib import Path

from click.testing import CliRunner, Result

from router.__main__ import main

SMALL = ("--requests", "12", "--sessions", "4", "--workers", "2,3", "--rates", "1", "--jobs", "1", "--lag-ms", "5,0")


def typed(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "trace", *arguments])


def test_the_same_arguments_print_the_same_json() -> None:
    first, second = typed(*SMALL, "--json"), typed(*SMALL, "--json")
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    told = json.loads(first.stdout)
    assert [(each["workers"], each["mode"], each["lag_s"], each["shared"]) for each in told["cells"]] == [
        (2, "kv", 0.005, True),
        (2, "round-robin", 0.005, True),
        (3, "kv", 0.005, True),
        (3, "round-robin", 0.005, True),
        (3, "kv", 0.0, True),
        (3, "kv", 0.005, False),
        (3, "round-robin", 0.005, False),
    ]
    assert {each["requests"] for each in told["cells"]} == {12}


def test_cost_parameters_reach_the_router() -> None:
    few = (*SMALL, "--modes", "kv-blocks", "--no-control", "--json")
    other = json.loads(typed(*few, "--cost", "prefill_scale=0", "--cost", "history_weight=9").stdout)
    assert other["shape"]["cost"]["prefill_scale"] == 0
    assert other["cells"] != json.loads(typed(*few).stdout)["cells"]


def test_tables_name_the_machine_every_cell_the_bound_and_the_verdicts(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    line = {"timestamp": 0, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 3]}
    file.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": 9000}) + "\n")
    shown = typed("--trace", str(file), "--jobs", "1", "--timing-scale", "1,2")
    assert shown.exit_code == 0
    for expected in (
        "41 runs in virtual time.",
        "2 requests in 9 s, 2,200 prompt tokens, 6 answer tokens",
        "distinct prompt blocks: 3 = 1,536 tokens; KV tokens of a fleet, by workers: 4: 2,800,000",
        "events 5 ms late, engines x2",
        "8 workers x 1, mode kv, by lag of events",
        "500 ms",
        "control: no two prompts share a block",
        "kv: hit rate at least 0.9 of the bound (engines x2): 9 of 9 cells, 9 needed",
    ):
        assert expected in shown.stdout, shown.stdout


def test_a_malformed_trace_is_named_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"timestamp": 0}\n')
    refused = typed("--trace", str(file))
    assert refused.exit_code == 2
    assert "t.jsonl:1: input_length: found None, allowed tokens, an integer of 1 or more" in refused.stderr
