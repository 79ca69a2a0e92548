"""What must be true of a world, by all that was seen of it.

always     an index holds of a rank what the rank held at the index's place in its stream, block for block, and says of
           a prompt what is held of it; where messages may be wrong, it is not beyond the rank at least
           the place in an epoch goes on, never back
           a reader that lacks something asks for it, after a pause that has a bound; nothing is current without the log
           a router has promised what it has not heard the end of, no more and, while no lease can expire, no less
           what is purged from the log a snapshot covers
           no reader is sent more for a question than `traffic.py` allows, nor more of the log than there is
at last    every index knows every live rank exactly, current and with equal digests, and no dead one
           a rank is known to hold what its engine holds, less only where hop A lost something for good
           every router can route to every live rank, and has promised nothing any more
           the log has had every batch that an outbox did not drop
"""

from typing import TYPE_CHECKING

from indexer.follow.checkpoint import decode_checkpoint
from indexer.follow.fold import RankView
from kv_protocol.codec import decode_message
from kv_protocol.errors import MalformedMessage
from kv_protocol.hashing import sequence_hashes
from kv_protocol.ids import WorkerRank
from tests.simulation.agent import Agent
from tests.simulation.broker import EVENTS
from tests.simulation.index import Index
from tests.simulation.oracle import BLOCK_SIZE, Held, depths, held_set
from tests.simulation.router import Router
from tests.simulation.setup import NEVER_EXPIRES_S
from tests.simulation.traffic import Answers, batches_of, blocks_of
from tests.simulation.workload import Conversation

if TYPE_CHECKING:
    from indexer.follow.follower import StreamFollower
    from tests.simulation.world import World

RECHECK_RATIO = 0.1
"""How often a rank is looked at again that stands where it stood."""

Live = dict[WorkerRank, Agent]


class _Place:
    """Where an index stood in a rank's stream, which may have begun anew: the rank was forgotten, or restarted."""

    def __init__(self, index: Index, rank: WorkerRank, view: RankView) -> None:
        self.view = view
        self._follower = index.follower(rank)
        self._restarts = self._follower.statistics().counts.restarts

    def differs(self, before: "_Place") -> bool:
        """Whether anything happened since."""
        here, there = self.view, before.view
        return (here.seq, here.epoch, here.stale) != (there.seq, there.epoch, there.stale)

    @property
    def life(self) -> tuple[int, int]:
        """The life of the stream, while this place is remembered."""
        return id(self._follower), self._restarts

    def is_behind(self, before: "_Place") -> bool:
        """Whether it is the same life of the stream, and not as far."""
        return self.life == before.life and self.view.seq < before.view.seq


class Truth:
    """Sees all that happens in a world; raises an `AssertionError` that says what is wrong, and where."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self._log_blocks = self._log_batches = 0
        self._history: dict[tuple[WorkerRank, int], dict[int, Held]] = {}
        self._logged: dict[tuple[WorkerRank, int], set[int]] = {}
        self._purged: dict[str, int] = {}
        self._seen_objects: set[str] = set()
        self._silences: dict[tuple[int, WorkerRank], tuple[StreamFollower, int, float]] = {}
        self._places: dict[tuple[int, WorkerRank], _Place] = {}
        limits = world.setup.follower
        self.answers = Answers(0.0 if world.kind == "silent" else limits.gap_s, limits.answer_s)

    # -------------------------------------------------------------- what is seen
    def stood(self, rank: WorkerRank, epoch: int, seq: int, held: Held) -> None:
        """After `seq` of `epoch` the rank held `held`."""
        self._history.setdefault((rank, epoch), {0: frozenset()})[seq] = held
        self.answers.on_numbered(rank, epoch, seq, self._world.timeline.now_s)

    def logged(self, rank: WorkerRank, data: bytes) -> None:
        """The log has another message of the rank."""
        self._log_blocks += blocks_of(data)
        self._log_batches += batches_of(data)
        try:
            batches = decode_message(data)
        except MalformedMessage:
            return
        for batch in batches:
            self._logged.setdefault((rank, batch.epoch), set()).add(batch.seq)

    def purged(self, created: str, up_to_seq: int) -> None:
        """The stream of that birth has nothing any more up to this seq, because a keeper wanted it so."""
        self._purged[created] = max(up_to_seq, self._purged.get(created, 0))
        self._seen_objects = set()
        self._check_covered()

    # -------------------------------------------------------------- always
    def _check_covered(self) -> None:
        broker = self._world.broker
        created, objects = broker.streams[EVENTS].created, broker.objects
        purged = self._purged.get(created, 0)
        if purged and objects.keys() != self._seen_objects:
            self._seen_objects = set(objects)
            covered = [_covered(data, created) for data in objects.values()]
            assert max(covered, default=0) >= purged, f"purged up to {purged}, covered are {covered}"

    def check(self) -> None:
        """Look at what the indexes know now."""
        world = self._world
        self._check_covered()
        prompt = _hashes(world.random.choice(world.workload.conversations))
        for life, index in world.indexes():
            ranks = index.fold.ranks()
            for rank, view in zip(ranks, index.fold.overlap(prompt, ranks), strict=True):
                before, now = self._places.get((life, rank)), _Place(index, rank, view)
                if before is None or now.differs(before) or world.random.random() < RECHECK_RATIO:
                    self._places[life, rank] = now
                    where = f"{index.name}: {rank}"
                    assert before is None or not now.is_behind(before), f"{where}: back from {before.view} to {view}"
                    self._check_rank(where, index, rank, view, prompt)
                assert view.stale or index.connection.is_connected, f"{index.name}: {rank}: current without a log"
                self._check_asking(life, index, rank)
        for router in world.routers.values():
            self._check_promises(router)

    def _check_promises(self, router: Router) -> None:
        promised = sum(load.active_requests for load in router.state.loads().values())
        running, can_expire = len(router.running), self._world.setup.router.lease_s < NEVER_EXPIRES_S
        assert promised <= running, f"{router.name}: promised {promised}, running {running}"
        assert promised == running or can_expire, f"{router.name}: promised {promised}, running {running}"

    def _check_rank(self, where: str, index: Index, rank: WorkerRank, view: RankView, prompt: list[int]) -> None:
        past = self._history.get((rank, view.epoch), {0: frozenset()})
        held = held_set(index.fold.held(rank))
        if self._world.kind == "silent":
            assert view.seq <= max(past), f"{where}: at {view.seq} of {view.epoch}, beyond {max(past)}"
        else:
            assert view.seq in past, f"{where}: at {view.seq} of {view.epoch}, where it never stood"
            assert held == past[view.seq], f"{where}: at {view.seq}, wrong in {held ^ past[view.seq]}"
        true = depths(prompt, held)
        assert view.overlap_blocks == true, f"{where}: overlap {view.overlap_blocks} is {true}"

    def _check_asking(self, life: int, index: Index, rank: WorkerRank) -> None:
        follower, now_s = index.follower(rank), index.clock.now()
        question = follower.question
        if question.wants is None or question.is_in_flight(now_s) or not index.connection.is_connected:
            self._silences.pop((life, rank), None)
            return
        request_id = index.newest_question.get(rank, 0)
        known, newest_id, since_s = self._silences.get((life, rank), (follower, -1, now_s))
        if known is not follower or newest_id != request_id:  # another follower: the rank was forgotten meanwhile
            since_s = now_s
        self._silences[life, rank] = follower, request_id, since_s
        silent_s = now_s - since_s
        assert silent_s <= self._world.setup.follower.backoff_max_s, f"{index.name}: {rank}: silent for {silent_s} s"

    # -------------------------------------------------------------- at last
    def check_at_last(self) -> None:
        """Look at all that should have healed."""
        world = self._world
        agents = [agent for agent in world.agents.values() if agent.is_alive]
        live = {agent.rank(n): agent for agent in agents for n in agent.dp_ranks}
        for rank, agent in live.items():
            assert agent.intake.is_read, f"{rank}: hop A is not read to its end"
            self._check_log(rank, agent)
        for _, index in world.indexes():
            self._check_index(index, live)
        for router in world.routers.values():
            self._check_router(router, live)
        self._check_traffic()

    def _check_log(self, rank: WorkerRank, agent: Agent) -> None:
        outbox = agent.core.outboxes[rank.dp_rank]
        assert outbox.settled_seq == outbox.last_seq, f"{rank}: published up to {outbox.settled_seq}"
        if not outbox.dropped_batches_total and not self._world.setup.hop_b.spoil_ratio:
            missing = set(range(1, outbox.last_seq + 1)) - self._logged.get((rank, outbox.epoch), set())
            assert not missing, f"{rank}: the log never had {sorted(missing)}"

    def _check_index(self, index: Index, live: Live) -> None:
        known = set(index.fold.ranks())
        assert known == set(live), f"{index.name}: unknown: {set(live) - known}, dead and known: {known - set(live)}"
        for rank, agent in live.items():
            (view,) = index.fold.overlap((), (rank,))
            outbox = agent.core.outboxes[rank.dp_rank]
            place = ("", outbox.epoch, outbox.last_seq)
            assert (view.stale, view.epoch, view.seq) == place, f"{index.name}: {rank}: {view}, not {place}"
            held, mirrored = held_set(index.fold.held(rank)), agent.mirrored(rank.dp_rank)
            truth = agent.engine.held(rank.dp_rank)
            assert held == mirrored, f"{index.name}: {rank}: wrong in {held ^ mirrored}"
            state = index.fold.state(rank)
            digests = () if state is None else state.digests
            told = agent.core.heartbeat(rank.dp_rank).tiers
            assert tuple(each for each in digests if each.block_count) == told, f"{index.name}: {rank}: digests differ"
            assert held <= truth, f"{index.name}: {rank}: invented {held - truth}"
            if agent.is_lossless:
                assert held == truth, f"{index.name}: {rank}: lacks {truth - held}"
                self._check_reuse(index, rank, agent)

    def _check_reuse(self, index: Index, rank: WorkerRank, agent: Agent) -> None:
        for conversation in self._world.workload.conversations:
            (view,) = index.fold.overlap(_hashes(conversation), (rank,))
            reused = agent.engine.reused_blocks(rank.dp_rank, conversation.request("", (), 1))
            predicted = view.overlap_blocks[0]
            assert predicted == reused or (predicted > reused and not conversation.is_alone), f"{rank}: {reused=}"

    def _check_router(self, router: Router, live: Live) -> None:
        assert not router.running, f"{router.name}: still at {list(router.running)}"
        for rank, load in router.state.loads().items():
            promised = (load.active_requests, load.active_blocks, load.prefill_tokens_queued)
            assert promised == (0, 0, 0), f"{router.name}: {rank}: promised {load}"
        if live:
            verdict = router.decide(self._world.workload.request(), "at last")
            decision = verdict.decision()
            trust = {WorkerRank(each.worker_id, each.dp_rank): each.trust for each in decision.candidates}
            assert trust == dict.fromkeys(live, "EXACT"), f"{router.name}: {decision}"
            assert not any(each.predicted_blocks for each in decision.candidates), f"{router.name}: {decision}"
            readiness = router.routing.readiness()
            assert (readiness.reasons, readiness.notes) == ([], []), f"{router.name}: {readiness}"

    def _check_traffic(self) -> None:
        allowed = self._log_blocks * (2 if self._world.setup.hop_b.double_ratio else 1)
        for life, index in enumerate(self._world.index_lives):
            logged = index.traffic.logged
            assert logged <= allowed, f"{index.name}, life {life}: {logged} blocks of the log, which has {allowed}"

    def published_blocks(self) -> float:
        """Return what all batches count that were numbered: those in the log, and those that an outbox dropped."""
        numbered = sum(agent.core.outboxes[n].last_seq for agent in self._world.agent_lives for n in agent.dp_ranks)
        return numbered * self._log_blocks / max(1, self._log_batches)


def _covered(data: bytes, created: str) -> int:
    try:
        checkpoint = decode_checkpoint(data)
    except MalformedMessage:
        return 0
    return checkpoint.stream_seq if checkpoint.stream_created == created else 0


def _hashes(conversation: Conversation) -> list[int]:
    return sequence_hashes(conversation.tokens, BLOCK_SIZE, cache_salt=conversation.cache_salt)
