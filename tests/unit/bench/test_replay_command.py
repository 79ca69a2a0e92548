"""The bench of replays: every decision of its journal is taken again and equal, and the figures are stated."""

import json

from click.testing import CliRunner

from bench.decision.fleet import IN_FLIGHT, DecisionShape
from bench.decision.replayed import journal_of, replay, replay_time

RANKS = 2


def test_every_decision_of_the_journal_comes_out_equal_also_after_many_heartbeats() -> None:
    found = replay_time(journal_of(DecisionShape(RANKS, 4), 1500))
    assert (found.decisions, found.equal) == (1500 + IN_FLIGHT * RANKS,) * 2
    assert found.s_per_100000 > 0


def test_the_command_states_the_machine_and_the_figure() -> None:
    arguments = ["--decisions", "20", "--ranks", str(RANKS), "--blocks", "4"]
    told = json.loads(CliRunner().invoke(replay, [*arguments, "--json"]).stdout)
    assert told["decisions"] == told["equal"] == 20 + IN_FLIGHT * RANKS
    assert told.keys() >= {"machine", "cpu_s", "s_per_100000"}
    words = CliRunner().invoke(replay, arguments).stdout
    assert "for 100,000 (target at 8 ranks, 128 blocks: 4 s)" in words
