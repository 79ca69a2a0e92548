"""What a router's journal says of its requests and of its fleet, as a workload for simulated engines.

a request     a first attempt that was decided for prompt and answer together: its time, its prompt's hashes and length,
              its limit, its session, and how long its answer was
left out      retries, phases of disaggregated requests, embeddings, prompts that were not encoded, other models
a rank        its registration and fitness at the first of these decisions, and the KV blocks that it stated
its speed     its times as multiples of a reference engine's, learnt from recorded outcomes by the router's own rule
              (`router/native/rates.hpp`)

The length of an answer is the worker's count, else what the times of its tokens say, else the mean of the others.

`JournalOfOne` reads the journal, and asks other policies for their choices at the recorded moments.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from bench.routing.trace import TraceRequest
from kv_protocol.codec import unpack_u64
from kv_protocol.decided import Decided
from kv_protocol.fleet import WorkerRegistered
from kv_protocol.ids import WorkerRank
from kv_protocol.journal import FleetApplied, JournalRecord, LedgerApplied, OutcomeKnown, PolicyChanged
from kv_protocol.ledger import Routed
from router.decision.policies import MODES
from router.decision.policy import Policy
from router.decision.policy_store import swapped
from router.decision.state import RateFactors, RouterState, StateSettings
from router.decision.verdict import Verdict
from router.fleet.registry import TextDigests
from router.journal.replay import Continuity, JournalEntry, Redecided, Replay
from router.native import built
from router.planner.service import answered_tokens
from router.shadows.comparison import Tally
from worker_agent.port.types import EngineDescription

REQUESTS_MAX = 200_000
_SEQUENCES, _BATCHED_TOKENS = 256, 8192
"""Used if an engine does not state them: TensorRT-LLM's and vLLM's defaults are of this size."""


class JournalUnfit(Exception):
    """The journal has too little for a simulation; the message says what is missing."""


class RecordedFigures(NamedTuple):
    """What was measured of the requests with a known outcome. `hit_rate` None: no cached tokens were reported."""

    hit_rate: float | None
    ttft_s: tuple[float, ...]


class RecordedFleet(NamedTuple):
    """The ranks that served, and the policy in force, at the first request."""

    ranks: tuple[WorkerRank, ...]
    registrations: tuple[WorkerRegistered, ...]
    policy: Policy
    block_size: int

    def descriptions(self, kv_blocks: int, seq_len: int) -> tuple[EngineDescription, ...]:
        """Return the engines' settings; a rank that states no KV blocks gets `kv_blocks`; 0: all ranks must state them.

        Raises:
            JournalUnfit: a rank states no KV blocks, and `kv_blocks` is 0.
        """
        found = list[EngineDescription]()
        for rank, told in zip(self.ranks, self.registrations, strict=True):
            blocks = told.total_kv_blocks or kv_blocks
            if not blocks:
                raise JournalUnfit(f"{rank} states no total_kv_blocks: --kv-blocks says how many it has")
            found.append(
                EngineDescription(
                    model=told.model,
                    version="simulated",
                    event_source="simulated",
                    block_size=self.block_size,
                    total_kv_blocks=blocks,
                    max_num_seqs=told.max_num_seqs or _SEQUENCES,
                    max_num_batched_tokens=told.max_num_batched_tokens or _BATCHED_TOKENS,
                    max_seq_len=max(seq_len, told.max_seq_len),
                )
            )
        return tuple(found)


class Recorded:
    """The requests of one model in one router's journal, in the order of their decisions."""

    def __init__(self, requests_max: int = REQUESTS_MAX) -> None:
        """Take the first `requests_max` requests for the model that the first one names."""
        self.model, self._requests_max = "", requests_max
        self.fleet: RecordedFleet | None = None
        self.left_out: Counter[str] = Counter()
        self.learnt = RouterState(StateSettings(text=TextDigests("", "")))
        """Knows the speed of ranks from decisions and outcomes, and nothing else."""
        self._open = dict[str, Verdict]()
        """Decisions whose outcomes are not known yet."""
        self._decisions: list[Decided] = []
        self._outcomes: dict[str, OutcomeKnown | None] = {}
        """Outcomes only of the decisions in `_decisions`, as a journal may have any number. None: not known yet."""

    @property
    def requests(self) -> int:
        """How many requests there are."""
        return len(self._decisions)

    def take(self, record: JournalRecord, found: Redecided | None, policy: Policy | None) -> None:
        """Take the next record; `found` is a decision taken again, and `policy` the one in force before the record."""
        if isinstance(record, Decided) and found is not None:
            if found.verdict is not None:
                self._open[found.decision_id] = found.verdict
            self._decided(record, found.verdict, policy)
        elif isinstance(record, OutcomeKnown):
            verdict = self._open.pop(record.decision_id, None)
            if verdict is not None and record.outcome == "ok":
                tokens = record.output_tokens or 0
                self.learnt.core.learn(verdict, record.now_s, record.ttft_s, record.itl_s, tokens)
            if record.decision_id in self._outcomes:
                self._outcomes[record.decision_id] = record
        elif isinstance(record, LedgerApplied) and record.router and isinstance(record.event, Routed):
            self.left_out["of other routers"] += 1
        elif isinstance(record, FleetApplied | PolicyChanged) and self._decisions:
            self.left_out["changes of the fleet or of the policy"] += 1

    def _decided(self, record: Decided, verdict: Verdict | None, policy: Policy | None) -> None:
        request = record.request
        reason = (
            "retries" * bool(request.tried)
            or "phases of disaggregated requests" * (request.phase != "whole")
            or "embeddings" * (request.endpoint == "embeddings")
            or "not encoded" * (not request.isl_tokens)
            or "of other models" * bool(self.model and request.model != self.model)
            or "beyond the first" * (len(self._decisions) >= self._requests_max)
        )
        if not reason and self.fleet is None:
            if verdict is None or policy is None:
                reason = "before the journal is exact"
            else:
                self.model, self.fleet = request.model, _fleet_of(verdict, policy)
        if reason:
            self.left_out[reason] += 1
        else:
            self._decisions.append(record)
            self._outcomes[request.decision_id] = None

    def trace(self) -> list[TraceRequest]:
        """Return the requests from time 0 on; each id of their blocks stands for a block of the fleet's size.

        Raises:
            JournalUnfit: there are none.
        """
        if self.fleet is None or not self._decisions:
            reasons = ", ".join(f"{number} {reason}" for reason, number in self.left_out.items()) or "no decision"
            raise JournalUnfit(f"the journal has no request to play: {reasons}")
        began_s, size = self._decisions[0].now_s, self.fleet.block_size
        fresh, made = count(), list[TraceRequest]()
        ids_of = defaultdict[int, int](fresh.__next__)
        answers = [answered_tokens(self._outcomes.get(each.request.decision_id)) for each in self._decisions]
        lengths = [tokens for tokens in answers if tokens is not None]
        mean = sum(lengths) / len(lengths) if lengths else built.OUTPUT_TOKENS
        for decided, tokens in zip(self._decisions, answers, strict=True):
            request = decided.request
            ids = [ids_of[each] for each in unpack_u64(request.sequence_hashes)[: request.isl_tokens // size]]
            ids += [next(fresh) for _ in range(-(-request.isl_tokens // size) - len(ids))]
            made.append(
                TraceRequest(
                    decided.now_s - began_s,
                    request.isl_tokens,
                    max(1, round(tokens or mean)),
                    tuple(ids),
                    request.session_id,
                    request.max_tokens,
                )
            )
        return made

    def measured(self, first: int = 0) -> RecordedFigures:
        """Return what was measured of the requests from number `first` on."""
        cached = prompt = 0
        ttft_s = list[float]()
        for each in self._decisions[first:]:
            known = self._outcomes.get(each.request.decision_id)
            if known is None or known.outcome != "ok":
                continue
            if known.cached_tokens is not None:
                cached, prompt = cached + known.cached_tokens, prompt + each.request.isl_tokens
            if known.ttft_s is not None:
                ttft_s.append(known.ttft_s)
        return RecordedFigures(cached / prompt if prompt else None, tuple(ttft_s))


def _fleet_of(verdict: Verdict, policy: Policy) -> RecordedFleet:
    ranks = verdict.model_view
    told = ranks.registrations
    fit = [place for place, unfit in enumerate(ranks.unfit) if not unfit and told[place].role != "encode"]
    return RecordedFleet(
        tuple(ranks.ranks[place] for place in fit),
        tuple(told[place] for place in fit),
        policy,
        verdict.request.block_size,
    )


def speeds_of(learnt: RouterState, ranks: Sequence[WorkerRank]) -> list[RateFactors]:
    """Return the speeds of these ranks; a rank without measurements has its model's, or 1."""
    factors = learnt.rate_factors()
    return [factors.get(rank, RateFactors(1.0, 1.0, 0, 0)) for rank in ranks]


class JournalOfOne:
    """The journal of one router: its requests, and what other policies would have chosen at the same moments.

    `tallies` and `policies` have the others by name, once a decision was read.
    """

    def __init__(self, others: Mapping[str, Mapping[str, Any]], requests_max: int, *, asks: bool = False) -> None:
        """`others`: the fields in which each differs from the policy in force at the first request.

        `asks`: whether they are asked for their choices at the recorded moments.
        """
        self.recorded = Recorded(requests_max)
        self._others, self._asks = others, asks
        self.policies: dict[str, Policy] = {}
        self.tallies: dict[str, Tally] = {}
        self._asked: list[Policy] = []
        self._replay = Replay(policies=self._asked)  # it reads the list at each decision
        self._continuity = Continuity()
        self._router = ""

    def take(self, entry: JournalEntry) -> None:
        """Fold in the records of a message.

        Raises:
            JournalUnfit: it is another router's.
        """
        if self._router not in ("", entry.router):
            raise JournalUnfit(f"--router: found journals of {self._router} and {entry.router}, allowed one")
        self._router = entry.router
        for record in self._continuity.records(entry.message):
            self.fold(record)

    def fold(self, record: JournalRecord) -> None:
        """Fold in one record; raise `ConfigurationError` if a field of another policy is not allowed."""
        state = self._replay.state
        policy = None if state is None else state.policy
        if isinstance(record, Decided) and policy is not None and not self.policies:
            self._resolve(policy)
        found = self._replay.take(record)
        decided = found if isinstance(found, Redecided) else None
        self.recorded.take(record, decided, policy)
        if isinstance(record, Decided) and decided is not None and decided.verdict is not None:
            for tally, other in zip(self.tallies.values(), decided.otherwise, strict=self._asks):
                tally.add(other)

    def _resolve(self, live: Policy) -> None:
        if live.mode not in MODES:
            raise JournalUnfit(
                f"policy.mode: found {live.mode}, allowed {', '.join(MODES)}: a simulation has no others"
            )
        for name, fields in self._others.items():
            policy = swapped(live, fields, MODES, replace_all=False)
            if policy != live:
                self.policies[name], self.tallies[name] = policy, Tally(name, dict(fields))
        self._asked += self.policies.values() if self._asks else ()
