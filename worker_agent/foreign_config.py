"""The configuration trees of `consolidate` and `attach`: engines that publish their KV events themselves."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from kv_protocol.ids import BLOCK_SIZE_MAX, DP_RANK_MAX, WORKER_ID_PATTERN
from kv_runtime.config import ControlSection, NatsSection, Section, Settings, TelemetrySection
from worker_agent.config import StreamsSection
from worker_agent.core.mirror import ENGINE
from worker_agent.endpoints import checked_endpoint, rank_endpoint

_NATS = NatsSection(url="nats://127.0.0.1:4222")
_RANK = Annotated[int, Field(ge=0, le=DP_RANK_MAX)]


class PublisherSection(Section):
    """One publisher of hop A."""

    source: str = Field(ENGINE, pattern="^[a-z0-9_-]{1,32}$", description="whose events these are: engine, host, ...")
    endpoint: str = Field(description="its PUB socket: tcp://host:port or ipc://path")
    replay_endpoint: str = Field("", description="its ROUTER socket; empty: it has none, and every gap is a loss")
    dp_rank: _RANK | None = Field(None, description="the one rank it speaks for; null: its batches say which")
    topic: str = Field("", max_length=256, description="prefix of the topics that are read; empty: all")
    allow_remote: bool = Field(default=False, description="other machines' addresses too; what they say is believed")

    @model_validator(mode="after")
    def _endpoints(self) -> "PublisherSection":
        checked_endpoint("endpoint", self.endpoint, allow_remote=self.allow_remote)
        if self.replay_endpoint:
            checked_endpoint("replay_endpoint", self.replay_endpoint, allow_remote=self.allow_remote)
        return self


class WorkerStreamsSection(Section):
    """One worker whose streams this process heads."""

    id: str = Field(pattern=f"^{WORKER_ID_PATTERN}$", description="its name in the fleet")
    model: str = Field(min_length=1, max_length=256, description="the model's name, as it is registered")
    instance: str = Field("", max_length=64, description="as it is registered; empty: one that nobody registered")
    block_size: int = Field(ge=1, le=BLOCK_SIZE_MAX, description="tokens in a KV block")
    dp_ranks: tuple[_RANK, ...] = Field((0,), min_length=1, description="its ranks, each a KV cache of its own")
    is_eagle: bool = Field(default=False, description="whether it drafts with EAGLE, and keys its cache by bigrams")
    publishers: tuple[PublisherSection, ...] = Field(min_length=1, description="who tells of its caches")

    @model_validator(mode="after")
    def _one_voice(self) -> "WorkerStreamsSection":
        problems = [] if len(set(self.dp_ranks)) == len(self.dp_ranks) else [f"dp_ranks: found {self.dp_ranks}, twice"]
        ranks_of: dict[str, list[int | None]] = {}
        for publisher in self.publishers:
            ranks_of.setdefault(publisher.source, []).append(publisher.dp_rank)
            if publisher.dp_rank is not None and publisher.dp_rank not in self.dp_ranks:
                problems.append(f"publishers: found dp_rank {publisher.dp_rank}, allowed one of {self.dp_ranks}")
        voices = {publisher.dp_rank for publisher in self.publishers}
        silent = [str(rank) for rank in self.dp_ranks if not voices & {rank, None}]
        if silent:
            problems.append(f"publishers: found none of dp_rank {', '.join(silent)}, allowed at least one a rank")
        for source, ranks in ranks_of.items():
            if len(ranks) > 1 and (None in ranks or len(set(ranks)) < len(ranks)):
                problems.append(f"publishers: found source {source!r} of dp_ranks {ranks}, allowed each rank once")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class ConsolidateSettings(Settings):
    """`worker-agent consolidate`."""

    workers: tuple[WorkerStreamsSection, ...] = Field((), description="the host's workers")
    events: StreamsSection = StreamsSection()
    control: ControlSection = ControlSection(port=8003)
    nats: NatsSection = _NATS
    telemetry: TelemetrySection = TelemetrySection()

    @model_validator(mode="after")
    def _names_differ(self) -> "ConsolidateSettings":
        names = [worker.id for worker in self.workers]
        if len(set(names)) < len(names):
            raise ValueError(f"workers: found ids {names}, allowed each once")
        return self


class AttachedWorkerSection(Section):
    """Who the worker is."""

    id: str = Field("worker-0", pattern=f"^{WORKER_ID_PATTERN}$", description="unique in the fleet, kept over restarts")
    role: Literal["aggregated", "prefill", "decode", "encode"] = Field("aggregated", description="phases it serves")


class AttachedEngineSection(Section):
    """The engine that is attached; sizes are per rank, 0: not known."""

    kind: Literal["vllm", "sglang", "trtllm"] = Field("vllm", description="which engine it is")
    base_url: str = Field("", description="its OpenAI endpoint, http://host:port; empty: it is not registered")
    model: str = Field("", max_length=256, description="the model's name")
    served_names: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="the names that requests may use; empty: the model's"
    )
    text: str = Field("byte", description="tokenizer and template: `byte`, or a local model directory")
    block_size: int = Field(16, ge=1, le=BLOCK_SIZE_MAX, description="tokens in a KV block")
    dp_ranks: int = Field(1, ge=1, le=64, description="data-parallel ranks; beyond 1 each has a publisher of its own")
    is_eagle: bool = Field(default=False, description="whether it drafts with EAGLE, and keys its cache by bigrams")
    total_kv_blocks: int = Field(0, ge=0, le=100_000_000, description="KV blocks of a rank")
    max_num_seqs: int = Field(0, ge=0, le=65_536, description="requests decoded together")
    max_num_batched_tokens: int = Field(0, ge=0, le=1 << 20, description="tokens computed in one iteration")
    max_seq_len: int = Field(0, ge=0, le=1 << 22, description="prompt and answer together, in tokens")
    publish_endpoint: str = Field("tcp://127.0.0.1:5557", description="PUB socket of rank 0; rank r: port + r")
    replay_endpoint: str = Field("", description="ROUTER socket of rank 0, likewise; empty: every gap is a loss")
    topic: str = Field("", max_length=256, description="prefix of the topics that are read; empty: all")
    allow_remote: bool = Field(default=False, description="other machines' addresses too; what they say is believed")

    @field_validator("base_url")
    @classmethod
    def _without_path_of_requests(cls, base_url: str) -> str:
        if base_url.rstrip("/").endswith("/v1"):
            raise ValueError(f"base_url: found {base_url!r}, allowed without /v1, which every request adds")
        return base_url

    @model_validator(mode="after")
    def _ports_apart(self) -> "AttachedEngineSection":
        addresses = [publisher.endpoint for publisher in self.publishers()]
        addresses += [publisher.replay_endpoint for publisher in self.publishers() if publisher.replay_endpoint]
        if len(set(addresses)) < len(addresses):
            raise ValueError(f"replay_endpoint: found {self.replay_endpoint!r}, allowed ports that no publisher has")
        return self

    def publishers(self) -> tuple[PublisherSection, ...]:
        """Return the engine's publishers: one for all, or one a rank."""
        publish = checked_endpoint("publish_endpoint", self.publish_endpoint, allow_remote=self.allow_remote)
        replay = self.replay_endpoint and checked_endpoint(
            "replay_endpoint", self.replay_endpoint, allow_remote=self.allow_remote
        )
        return tuple(
            PublisherSection(
                endpoint=rank_endpoint(publish, dp_rank),
                replay_endpoint=replay and rank_endpoint(replay, dp_rank),
                dp_rank=dp_rank if self.dp_ranks > 1 else None,
                topic=self.topic,
                allow_remote=self.allow_remote,
            )
            for dp_rank in range(self.dp_ranks)
        )


class AttachSettings(Settings):
    """`worker-agent attach`."""

    worker: AttachedWorkerSection = AttachedWorkerSection()
    engine: AttachedEngineSection = AttachedEngineSection()
    events: StreamsSection = StreamsSection()
    control: ControlSection = ControlSection(port=0)
    nats: NatsSection = _NATS
    telemetry: TelemetrySection = TelemetrySection()

    def streams(self, instance: str) -> WorkerStreamsSection:
        """Return the one worker as `consolidate` would have it."""
        engine = self.engine
        return WorkerStreamsSection(
            id=self.worker.id,
            model=engine.model,
            instance=instance,
            block_size=engine.block_size,
            dp_ranks=tuple(range(engine.dp_ranks)),
            is_eagle=engine.is_eagle,
            publishers=engine.publishers(),
        )
