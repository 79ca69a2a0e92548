"""A live recording: the runs of `../shared/gpu/live.py`, one for each policy, and the workload that its clients sent.

file        a list of runs (`live.json`), or an object whose keys `runs_N_blocks` are such lists, N blocks an engine
rows        [isl, cached, ttft_s, e2e_s, worker, turn, overlap, session] in the order of the answers' ends; the worker
            is null behind a router that does not name it
workload    rows do not say how long the answers were, and which system prompt a session has. Both follow from the
            clients' generator (`load.py` beside `live.py`), which draws from one seed. The draws are repeated here;
            the length of a prompt is the rows'
shared      of a system prompt: what first turns found of it in a cache, at most (a multiple of the block size)
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec

from bench.fidelity.closed_loop import Placer, Sent
from bench.fidelity.recording import Answered, Recording, RecordingInvalid, Session

SEED = 7
SYSTEM_WORDS = (1000, 1700, 550, 2000)
ADDED_WORDS = (100, 600)
ANSWER_TOKENS = (16, 64)
ANSWER_WORDS = 40
VOCABULARY_WORDS = 4000
TURNS = 6
SESSIONS = 200
"""Source: the kit's `load.py` (`sessions_of`), `live.py` (seed) and `tok/words.json`; `h200_live_policies.json`."""
USERS = 40
SENDING_S = 45.0
"""Source: `h200_live_policies.json` (`what`); the kit's README (`conc`, `limit`)."""
WORKERS = 4
BLOCK_TOKENS = 32
MAX_NUM_SEQS = 128
FORMER_NAMES = {"kv": "kv, prefill_scale 1, history_weight 0.5"}
"""What mode kv was when `h200_live_policies.json` was recorded. Source: `docs/BENCHMARKS.md`, "Live engines"."""


class LiveRow(NamedTuple):
    """One answered request."""

    isl_tokens: Annotated[int, msgspec.Meta(ge=1)]
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)]
    ttft_s: float
    e2e_s: float
    worker: str | None
    turn: Annotated[int, msgspec.Meta(ge=0, lt=TURNS)]
    overlap: Any
    session: Annotated[int, msgspec.Meta(ge=0, lt=SESSIONS)]


class _Run(msgspec.Struct, frozen=True):
    policy: str
    req_s: Annotated[float, msgspec.Meta(gt=0)]
    rows: Annotated[list[LiveRow], msgspec.Meta(min_length=1)]


class LiveRun(NamedTuple):
    """One policy on the real engines: its rows, and requests a second of the whole run."""

    policy: str
    requests_per_s: float
    rows: tuple[LiveRow, ...]

    @property
    def names_workers(self) -> bool:
        """Whether its rows say which worker answered."""
        return all(row.worker is not None for row in self.rows)


def load_runs(path: Path, blocks: int) -> tuple[LiveRun, ...]:
    """Return the runs of the file at `path` with `blocks` blocks an engine.

    Raises:
        RecordingInvalid: it holds no such runs.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
        runs = data.get(f"runs_{blocks}_blocks", []) if isinstance(data, dict) else data
        read = msgspec.convert(runs, tuple[_Run, ...])
    except OSError as error:
        raise RecordingInvalid(path.name, error.strerror, "a readable file") from error
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise RecordingInvalid(path.name, str(error), "a live recording") from error
    if not read:
        raise RecordingInvalid(path.name, "no runs", f"runs with {blocks} blocks")
    names = FORMER_NAMES if isinstance(data, dict) else {}
    return tuple(LiveRun(names.get(run.policy, run.policy), run.req_s, tuple(run.rows)) for run in read)


class DrawnSession(NamedTuple):
    """What the clients drew for one session: its system prompt, and each turn's answer in tokens."""

    system: int
    answers_tokens: tuple[int, ...]


@cache
def drawn_sessions() -> tuple[DrawnSession, ...]:
    """Return what the clients' generator draws from its seed."""
    draw = Random(SEED)  # noqa: S311 - a workload, not a secret
    _draw_words(draw, sum(SYSTEM_WORDS))
    return tuple(_drawn(draw) for _ in range(SESSIONS))


def _drawn(draw: Random) -> DrawnSession:
    system, answers_tokens = draw.randrange(len(SYSTEM_WORDS)), []
    for _ in range(TURNS):
        _draw_words(draw, draw.randint(*ADDED_WORDS))
        answers_tokens.append(draw.randint(*ANSWER_TOKENS))
        _draw_words(draw, ANSWER_WORDS)
    return DrawnSession(system, tuple(answers_tokens))


def _draw_words(draw: Random, words: int) -> None:
    for _ in range(words):
        draw.choice(range(VOCABULARY_WORDS))


def live_workload(runs: Sequence[LiveRun], blocks: int) -> Recording:
    """Return the workload that all `runs` were sent, on engines with `blocks` blocks.

    Raises:
        RecordingInvalid: no run has all turns of some session.
    """
    drawn = drawn_sessions()
    isl = {(row.session, row.turn): row.isl_tokens for run in runs for row in run.rows}
    shared = _shared_tokens(runs, drawn)
    sessions = []
    for number, session in enumerate(drawn):
        lengths = [shared[session.system], *(isl.get((number, turn), 0) for turn in range(TURNS))]
        added = tuple(after - before for before, after in pairwise(lengths))
        if min(added) < 1:
            raise RecordingInvalid(f"session {number}", lengths, "a row of each turn, each longer than the one before")
        sessions.append(Session(session.system, added, session.answers_tokens))
    return Recording(
        engine="vllm 0.24.0",
        model="4B-parameter shape",
        blocks_per_worker=blocks,
        block_size=BLOCK_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        concurrency=USERS,
        system_tokens=shared,
        sessions=tuple(sessions),
        sending_s=SENDING_S,
    )


def _shared_tokens(runs: Sequence[LiveRun], drawn: Sequence[DrawnSession]) -> tuple[int, ...]:
    shared = [0] * len(SYSTEM_WORDS)
    for row in (row for run in runs for row in run.rows if row.turn == 0):
        system = drawn[row.session].system
        shared[system] = max(shared[system], row.cached_tokens)
    return tuple(shared)


def answered(run: LiveRun) -> Iterator[Answered]:
    """Yield the run's rows as the comparison reads them, which does not tell workers apart."""
    drawn = drawn_sessions()
    for row in run.rows:
        after_first = drawn[row.session].answers_tokens[row.turn] - 1
        yield Answered(
            isl_tokens=row.isl_tokens,
            cached_tokens=row.cached_tokens,
            ttft_s=row.ttft_s,
            e2e_s=row.e2e_s,
            itl_s=(row.e2e_s - row.ttft_s) / after_first,
            worker=0,
            turn=row.turn,
        )


class BySystem(Placer):
    """Each session on the worker given for its system prompt, as a cache-aware router settles on."""

    def __init__(self, workers: Sequence[int], recording: Recording) -> None:
        self._worker_of = [workers[session.system] for session in recording.sessions]

    def choose(self, sent: Sent) -> int:
        """Return the worker of the session's system prompt."""
        return self._worker_of[sent.session]
