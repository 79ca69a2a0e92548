"""A recording of a real fleet under several placements: its shape, its workload, and how every request fared.

sessions     the first prompt is a shared system prompt and added tokens; every further one is all before it, the
             answer, and added tokens. A session may have ended early: the turns that were sent are those with
             rows of their length and number.
rows         one a request, in the order of `columns`; more columns than those read here are allowed
percentiles  `bench.report.percentile`, which is how the recordings' own summaries were made
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import msgspec

from bench.report import percentile

COLUMNS = ("isl", "cached", "ttft_s", "e2e_s", "itl_s", "worker", "turn")
SECONDS_STEP = 0.1
"""Makespans are recorded to that many seconds."""

Count = Annotated[int, msgspec.Meta(ge=1)]


class RecordingInvalid(Exception):
    """A recording cannot be used: the message has the place, the found and the allowed value."""

    def __init__(self, where: str, found: object, allowed: str) -> None:
        super().__init__(f"{where}: found {found!r}, allowed {allowed}")


class Answered(NamedTuple):
    """One request as its client saw it; times count from the moment of sending, `itl_s` is None of a single token."""

    isl_tokens: int
    cached_tokens: int
    ttft_s: float
    e2e_s: float
    itl_s: float | None
    worker: int
    turn: int


class FleetFigures(NamedTuple):
    """What is compared: a ratio of prompt tokens, requests a second of makespan, and seconds."""

    hit_ratio: float
    requests_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    itl_p50_s: float

    @classmethod
    def of(cls, answered: Sequence[Answered], requests_per_s: float) -> Self:
        """Return the figures of a run that had requests."""
        ttfts_s = [each.ttft_s for each in answered]
        return cls(
            hit_ratio=sum(each.cached_tokens for each in answered) / sum(each.isl_tokens for each in answered),
            requests_per_s=requests_per_s,
            ttft_p50_s=percentile(ttfts_s, 0.5),
            ttft_p90_s=percentile(ttfts_s, 0.9),
            itl_p50_s=percentile([each.itl_s for each in answered if each.itl_s is not None], 0.5),
        )


class Session(msgspec.Struct, frozen=True):
    """One conversation: the number of its system prompt, and the added and output tokens of each turn."""

    system: Annotated[int, msgspec.Meta(ge=0)]
    added_tokens: tuple[Count, ...]
    output_tokens: tuple[Count, ...]

    def prompts_tokens(self, system_tokens: Sequence[int]) -> Iterator[int]:
        """Yield the length of each turn's prompt."""
        tokens = system_tokens[self.system]
        for added, output in zip(self.added_tokens, self.output_tokens, strict=True):
            tokens += added
            yield tokens
            tokens += output

    def first(self, turns: int) -> "Session":
        """Return the session without what comes after its first `turns` turns."""
        return Session(self.system, self.added_tokens[:turns], self.output_tokens[:turns])


class RecordedRun(msgspec.Struct, frozen=True):
    """The workload under one placement. `hit`, `ttft_ms` and `itl_ms` are the recording's own summary."""

    policy: str
    workers: Count
    requests: Count
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    req_s: Annotated[float, msgspec.Meta(gt=0)]
    rows: Annotated[list[list[Any]], msgspec.Meta(min_length=1)]
    hit: float | None = None
    ttft_ms: dict[str, float] = {}
    itl_ms: dict[str, float] = {}


class _File(msgspec.Struct, frozen=True):
    engine: str
    gpu: str
    model: str
    blocks_per_worker: Count
    block_size: Count
    max_num_seqs: Count
    concurrency: Count
    system_prompt_tokens: tuple[Count, ...]
    sessions: tuple[Session, ...]
    columns: tuple[str, ...]
    runs: tuple[RecordedRun, ...]


class Recorded(NamedTuple):
    """The outcome of the real fleet under one placement.

    `unanswered` requests of the workload have no row; `unplanned` rows are of a length and turn that no session has.
    """

    policy: str
    workers: int
    answered: tuple[Answered, ...]
    figures: FleetFigures
    unanswered: int
    unplanned: int
    summary_differences: tuple[str, ...]


class Recording(NamedTuple):
    """A fleet of engines with `blocks_per_worker` blocks of `block_size` tokens, and what became of its requests.

    `keeps_answers`: a prompt contains the answers of the turns before it. `sending_s`: when clients stop sending.
    """

    engine: str
    gpu: str
    model: str
    blocks_per_worker: int
    block_size: int
    max_num_seqs: int
    concurrency: int
    system_tokens: tuple[int, ...]
    sessions: tuple[Session, ...]
    runs: tuple[Recorded, ...]
    keeps_answers: bool = True
    sending_s: float = math.inf

    @property
    def requests(self) -> int:
        """How many requests the workload has."""
        return sum(len(session.added_tokens) for session in self.sessions)

    @property
    def sequence_tokens_max(self) -> int:
        """The longest prompt together with its answer."""
        return max(
            prompt_tokens + output_tokens
            for session in self.sessions
            for prompt_tokens, output_tokens in zip(
                session.prompts_tokens(self.system_tokens), session.output_tokens, strict=True
            )
        )


def load_recording(path: Path) -> Recording:
    """Return the recording in the JSON file at `path`.

    Raises:
        RecordingInvalid: it is not a recording, or its parts contradict each other.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except OSError as error:
        raise RecordingInvalid(path.name, error.strerror, "a readable file") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingInvalid(path.name, str(error), "a fleet recording") from error
    _check(file)
    answered = [_answered(file, number) for number in range(len(file.runs))]
    sessions = _sent(file, answered)
    planned = _turns(sessions, file.system_prompt_tokens)
    return Recording(
        engine=file.engine,
        gpu=file.gpu,
        model=file.model,
        blocks_per_worker=file.blocks_per_worker,
        block_size=file.block_size,
        max_num_seqs=file.max_num_seqs,
        concurrency=file.concurrency,
        system_tokens=file.system_prompt_tokens,
        sessions=sessions,
        runs=tuple(_recorded(file, number, rows, planned) for number, rows in enumerate(answered)),
    )


def _check(file: _File) -> None:
    for column in COLUMNS:
        if column not in file.columns:
            raise RecordingInvalid("columns", file.columns, f"{column} among them")
    for name in ("system_prompt_tokens", "sessions", "runs"):
        if not getattr(file, name):
            raise RecordingInvalid(name, [], "one or more")
    for number, session in enumerate(file.sessions):
        _check_session(session, len(file.system_prompt_tokens), f"sessions[{number}]")


def _check_session(session: Session, systems: int, where: str) -> None:
    turns, outputs = len(session.added_tokens), len(session.output_tokens)
    if session.system >= systems:
        raise RecordingInvalid(f"{where}.system", session.system, f"below {systems}, the number of system prompts")
    if outputs != turns or not turns:
        allowed = f"{turns}, one for each of added_tokens, and 1 or more"
        raise RecordingInvalid(f"{where}.output_tokens", f"{outputs} values", allowed)


def _answered(file: _File, number: int) -> tuple[Answered, ...]:
    at = [file.columns.index(column) for column in COLUMNS]
    read = []
    for line, row in enumerate(file.runs[number].rows):
        where = f"runs[{number}].rows[{line}]"
        if len(row) != len(file.columns):
            raise RecordingInvalid(where, f"{len(row)} values", f"{len(file.columns)}, one for each of columns")
        try:
            each = msgspec.convert([row[column] for column in at], Answered)
        except msgspec.ValidationError as error:
            raise RecordingInvalid(where, row, f"numbers ({error})") from error
        _check_row(each, file.runs[number].workers, where)
        read.append(each)
    return tuple(read)


def _check_row(row: Answered, workers: int, where: str) -> None:
    if not 0 <= row.worker < workers:
        raise RecordingInvalid(f"{where}: worker", row.worker, f"0 to {workers - 1}")
    if not 0 <= row.cached_tokens <= row.isl_tokens or not row.isl_tokens:
        raise RecordingInvalid(f"{where}: cached", row.cached_tokens, f"0 to isl, which is 1 or more: {row.isl_tokens}")
    if not 0 < row.ttft_s <= row.e2e_s:
        raise RecordingInvalid(f"{where}: ttft_s", row.ttft_s, f"above 0, at most e2e_s: {row.e2e_s}")


def _sent(file: _File, answered: Iterable[Sequence[Answered]]) -> tuple[Session, ...]:
    rows = {(row.isl_tokens, row.turn) for rows in answered for row in rows}
    sessions = []
    for session in file.sessions:
        prompts_tokens = session.prompts_tokens(file.system_prompt_tokens)
        is_sent = [(tokens, turn) in rows for turn, tokens in enumerate(prompts_tokens)]
        sessions.append(session.first([*is_sent, False].index(False)))
    return tuple(sessions)


def _turns(sessions: Iterable[Session], system_tokens: Sequence[int]) -> Counter[tuple[int, int]]:
    return Counter(
        (tokens, turn) for session in sessions for turn, tokens in enumerate(session.prompts_tokens(system_tokens))
    )


def _recorded(file: _File, number: int, answered: tuple[Answered, ...], planned: Counter[tuple[int, int]]) -> Recorded:
    run, rows = file.runs[number], Counter((row.isl_tokens, row.turn) for row in answered)
    return Recorded(
        policy=run.policy,
        workers=run.workers,
        answered=answered,
        figures=FleetFigures.of(answered, run.req_s),
        unanswered=(planned - rows).total(),
        unplanned=(rows - planned).total(),
        summary_differences=tuple(_summary_differences(run, answered)),
    )


def _summary_differences(run: RecordedRun, answered: Sequence[Answered]) -> Iterator[str]:
    """Yield where the run's own summary is not what its rows say, beyond the rounding of both."""
    if len(answered) != run.requests:
        yield f"requests {run.requests}, there are {len(answered)} rows"
    if abs(run.requests / run.req_s - run.seconds) > SECONDS_STEP:
        yield f"req_s {run.req_s}, requests / seconds is {run.requests / run.seconds:.2f}"
    hit_ratio = FleetFigures.of(answered, run.req_s).hit_ratio
    if run.hit is not None and abs(run.hit - hit_ratio) > 1e-4:  # noqa: PLR2004 - four decimals
        yield f"hit {run.hit}, rows say {hit_ratio:.4f}"
    ttfts_ms = [row.ttft_s * 1e3 for row in answered]
    itls_ms = [row.itl_s * 1e3 for row in answered if row.itl_s is not None]
    for name, summary, values_ms in (("ttft_ms", run.ttft_ms, ttfts_ms), ("itl_ms", run.itl_ms, itls_ms)):
        for percent, summary_ms in summary.items():
            found_ms = percentile(values_ms, float(percent) / 100)
            if abs(found_ms - summary_ms) > 0.11:  # noqa: PLR2004 - both are rounded to 0.1 ms
                yield f"{name} p{percent} {summary_ms}, rows say {found_ms:.1f}"
