"""Planted bugs of subscribers to engine events."""

from tests.simulation.planted import Planted
from tests.support.planting import inside
from worker_agent.events import source_cursor
from worker_agent.events.dialects.trtllm import TrtllmRules
from worker_agent.events.dialects.trtllm_wire import TrtllmHead
from worker_agent.events.relearning import Relearning
from worker_agent.events.source_cursor import Delivery, SourceCursor


class JumpsHoles(SourceCursor):
    """Reads on behind a hole."""

    def on_live(self, sequence: int, payload: bytes, now_s: float) -> Delivery:
        self._expected = max(self._expected, sequence)
        return super().on_live(sequence, payload, now_s)


class GivesUpYoungHoles(SourceCursor):
    """Takes for lost what was published after the replay was asked for."""

    def on_replay_end(self, now_s: float) -> Delivery:
        self._replayed_max = max([self._replayed_max, *self._buffered])
        if self._question is not None:
            self._question = self._question._replace(expected=self._expected)
        return super().on_replay_end(now_s)


class NeverGivesUp(SourceCursor):
    """Asks for ever for what is lost for good."""

    def on_replay_end(self, now_s: float) -> Delivery:
        self._question, self._replayed_max = inside(source_cursor, "_Question")(-1, 0, in_doubt=False), -1
        return super().on_replay_end(now_s)


class WaitsForEver(SourceCursor):
    """Never asks again where an answer was lost."""

    def on_no_answer(self, now_s: float) -> Delivery:
        del now_s
        return Delivery()


class IgnoresIdJumps(TrtllmRules):
    """Goes on after the engine's buffer overflowed."""

    def _continues(self, head: TrtllmHead) -> bool:
        return super()._continues(head) or True


class NeverRelearns(Relearning):
    """Never forgets that events were lost."""

    def missing(self, dp_rank: int, lost: int) -> int:
        del dp_rank
        return lost


RELEARNING = "tests.simulation.intake.Relearning"
CURSOR = "tests.simulation.intake.SourceCursor"
RULES = "tests.simulation.engine.TrtllmRules"

PLANTED = (
    Planted(CURSOR, JumpsHoles, "faulty", 20),
    Planted(CURSOR, GivesUpYoungHoles, "faulty", 80),
    Planted(CURSOR, NeverGivesUp, "faulty", 40),
    Planted(CURSOR, WaitsForEver, "faulty", 40),
    Planted(RELEARNING, NeverRelearns, "faulty", 120, found_by=71),
    Planted(RULES, IgnoresIdJumps, "faulty", 120, found_by=33),
)
