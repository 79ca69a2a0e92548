"""A live recording: the runs of the kit in `../shared/gpu`, one for each policy, and the workload of its clients.

file        a list of runs (`live.json`), an object whose keys `runs_N_blocks` are such lists, N blocks an engine, or an
            object with one list `runs` whose members say `blocks_per_engine`
rows        [isl, cached, ttft_s, e2e_s, worker, turn, overlap, session] in the order of the answers' ends; the worker
            is null if the router does not name it, cached is null if no token was; a run may have no rows
workload    rows do not say how long the answers were, or which system prompt a session has. Both follow from the
            clients' generator (`load.py` of the kit), which draws from one seed; this module repeats the draws. A
            prompt's length is from the rows or, if no run reached it, estimated from its words
shared      the most tokens of a system prompt that a first turn found in a cache (a multiple of the block size)
session     its first prompt is a shared system prompt and added tokens; every further one is the prompt before it and
            added tokens

Sessions are taken in order, and played as a closed loop against simulated engines in virtual time.

    start        `concurrency` sessions begin at once; when one ends, the next begins
    answer ends  the session's next turn is sent at that moment, unless the recording's clients had stopped sending

Two sessions share only the blocks of their system prompt. A run is a function of its arguments.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count, islice, pairwise
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec

from bench.placement.policies import Placement
from bench.routing.trace import TraceInvalid, TraceRequest
from bench.routing.virtual_fleet import VirtualFleet, VirtualFleetShape
from bench.routing.virtual_router import describe
from worker_agent.port.types import EngineDescription

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
"""Source: `h200_live_policies.json` (`what`); the kit's README (`conc`)."""
WORKERS = 4
BLOCK_TOKENS = 32
FORMER_NAMES = {"runs": "kv that foresees no evictions", "runs_N_blocks": "kv, prefill_scale 1, history_weight 0.5"}
"""Mode kv as it was when `h100_sglang_live.json` and `h200_live_policies.json` were recorded, by the file's form.
Source: `docs/BENCHMARKS.md`, "Live engines"."""


Count = Annotated[int, msgspec.Meta(ge=1)]


class Session(msgspec.Struct, frozen=True):
    """One conversation: the number of its system prompt, and the added and output tokens of each turn."""

    system: Annotated[int, msgspec.Meta(ge=0)]
    added_tokens: tuple[Count, ...]
    output_tokens: tuple[Count, ...]

    def prompts_tokens(self, system_tokens: Sequence[int]) -> Iterator[int]:
        """Yield the length of each turn's prompt."""
        tokens = system_tokens[self.system]
        for added in self.added_tokens:
            tokens += added
            yield tokens


class Recording(NamedTuple):
    """A workload on engines with `blocks_per_worker` blocks of `block_size` tokens; clients send until `sending_s`."""

    blocks_per_worker: int
    block_size: int
    concurrency: int
    system_tokens: tuple[int, ...]
    sessions: tuple[Session, ...]
    sending_s: float


class LiveRow(NamedTuple):
    """One answered request."""

    isl_tokens: Annotated[int, msgspec.Meta(ge=1)]
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)] | None
    ttft_s: float
    e2e_s: float
    worker: str | None
    turn: Annotated[int, msgspec.Meta(ge=0, lt=TURNS)]
    overlap: Any
    session: Annotated[int, msgspec.Meta(ge=0, lt=SESSIONS)]


class LiveRun(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on the real engines: its rows, and the figures of the whole run, latencies in ms by percentile."""

    policy: str
    req_s: Annotated[float, msgspec.Meta(gt=0)]
    hit: float
    ttft_ms: dict[str, float]
    e2e_ms: dict[str, float]
    rows: tuple[LiveRow, ...]
    blocks_per_engine: int | None = None


def load_runs(path: Path, blocks: int) -> tuple[LiveRun, ...]:
    """Return the runs of the file at `path` with `blocks` blocks an engine.

    Raises:
        TraceInvalid: the file has no such runs.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
        runs = data.get(f"runs_{blocks}_blocks", data.get("runs", [])) if isinstance(data, dict) else data
        read = [run for run in msgspec.convert(runs, list[LiveRun]) if run.blocks_per_engine in (None, blocks)]
    except OSError as error:
        raise TraceInvalid(path.name, "file", error.strerror, "a readable file") from error
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise TraceInvalid(path.name, "file", str(error), "a live recording") from error
    if not read:
        raise TraceInvalid(path.name, "runs", "none", f"runs with {blocks} blocks")
    former = FORMER_NAMES["runs" if "runs" in data else "runs_N_blocks"] if isinstance(data, dict) else "kv"
    return tuple(msgspec.structs.replace(run, policy=former) if run.policy == "kv" else run for run in read)


class DrawnSession(NamedTuple):
    """What the clients drew for one session: its system prompt, each turn's words, and its answer in tokens."""

    system: int
    words: tuple[int, ...]
    answers_tokens: tuple[int, ...]


@cache
def drawn_sessions() -> tuple[DrawnSession, ...]:
    """Return what the clients' generator draws from its seed."""
    draw = Random(SEED)  # noqa: S311 - a workload, not a secret
    _draw_words(draw, sum(SYSTEM_WORDS))
    return tuple(_drawn(draw) for _ in range(SESSIONS))


def _drawn(draw: Random) -> DrawnSession:
    system, words, answers_tokens = draw.randrange(len(SYSTEM_WORDS)), [], []
    for _ in range(TURNS):
        words.append(draw.randint(*ADDED_WORDS))
        _draw_words(draw, words[-1])
        answers_tokens.append(draw.randint(*ANSWER_TOKENS))
        _draw_words(draw, ANSWER_WORDS)
    return DrawnSession(system, tuple(words), tuple(answers_tokens))


def _draw_words(draw: Random, words: int) -> None:
    for _ in range(words):
        draw.choice(range(VOCABULARY_WORDS))


def live_workload(runs: Sequence[LiveRun], blocks: int, sending_s: float) -> Recording:
    """Return the workload that the clients of all `runs` sent for `sending_s`, on engines with `blocks` blocks.

    Raises:
        TraceInvalid: a turn is not longer than the one before, or no run has a second turn.
    """
    drawn = drawn_sessions()
    isl = {(row.session, row.turn): row.isl_tokens for run in runs for row in run.rows}
    shared = _shared_tokens(runs, drawn)
    pairs = [(key, isl[key] - isl[key[0], key[1] - 1]) for key in isl if (key[0], key[1] - 1) in isl]
    if not pairs:
        raise TraceInvalid("runs", "rows", "no session with two turns", "one at least")
    word_tokens = sum(tokens for _, tokens in pairs) / sum(
        drawn[session].words[turn] + ANSWER_WORDS for (session, turn), _ in pairs
    )
    sessions = []
    for number, session in enumerate(drawn):
        lengths = [shared[session.system]]
        for turn, words in enumerate(session.words):
            guess = lengths[-1] + round((words + (ANSWER_WORDS if turn else 0)) * word_tokens)
            lengths.append(isl.get((number, turn), guess))
        added = tuple(after - before for before, after in pairwise(lengths))
        if min(added) < 1:
            raise TraceInvalid("runs", f"session {number}", lengths, "turns each longer than the one before")
        sessions.append(Session(session.system, added, session.answers_tokens))
    return Recording(
        blocks_per_worker=blocks,
        block_size=BLOCK_TOKENS,
        concurrency=USERS,
        system_tokens=shared,
        sessions=tuple(sessions),
        sending_s=sending_s,
    )


def _shared_tokens(runs: Sequence[LiveRun], drawn: Sequence[DrawnSession]) -> tuple[int, ...]:
    shared = [0] * len(SYSTEM_WORDS)
    for row in (row for run in runs for row in run.rows if row.turn == 0):
        system = drawn[row.session].system
        shared[system] = max(shared[system], row.cached_tokens or 0)
    return tuple(shared)


def live_engine(*, max_num_seqs: int = 128, max_num_batched_tokens: int = 8192) -> tuple[EngineDescription]:
    """Return a fleet's one engine, without KV blocks: `LiveFleet` sets them as in the recording.

    Source of `max_num_batched_tokens`: vLLM's default for an API server on a GPU of 70 GiB or more, except A100.
    """
    engine = describe(0)
    return (msgspec.structs.replace(engine, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),)


def turns_of(recording: Recording) -> Iterator[list[TraceRequest]]:
    """Yield the requests of each session; every id of their blocks stands for a block of the recording's size."""
    fresh, size = count(), recording.block_size
    systems = [tuple(islice(fresh, tokens // size)) for tokens in recording.system_tokens]
    for session in recording.sessions:
        known, turns = systems[session.system], list[TraceRequest]()
        tokens_of_turns = session.prompts_tokens(recording.system_tokens)
        for tokens, output_tokens in zip(tokens_of_turns, session.output_tokens, strict=True):
            block_ids = known + tuple(islice(fresh, -(-tokens // size) - len(known)))
            turns.append(TraceRequest(0.0, tokens, output_tokens, block_ids))
            known = block_ids[: tokens // size]
        yield turns


class LiveFleet(VirtualFleet):
    """A fleet of engines as in `model`, and clients that play the recording's workload once."""

    def __init__(
        self, recording: Recording, model: VirtualFleetShape, placement: Placement, *, seed: int, workers: int = WORKERS
    ) -> None:
        sessions = list(turns_of(recording))
        firsts = [turns[0] for turns in sessions]
        self._sending_s = recording.sending_s
        self._next_turn = {turn.block_ids: then for turns in sessions for turn, then in pairwise(turns)}
        self._later = iter(firsts[recording.concurrency :])
        size, blocks = recording.block_size, recording.blocks_per_worker
        engine = msgspec.structs.replace(model.engines[0], block_size=size, total_kv_blocks=blocks)
        shape, begun = model._replace(engines=(engine,) * workers, id_tokens=size), firsts[: recording.concurrency]
        super().__init__(shape, placement.policy, begun, seed=seed, modes_of=placement.modes_of)

    def _follow(self, request: TraceRequest) -> None:
        now_s = self._clock.now_s
        then = self._next_turn.get(request.block_ids)
        if now_s < self._sending_s and then is None:
            then = next(self._later, None)
        if now_s <= self._sending_s and then is not None:
            self._send(then, now_s)
