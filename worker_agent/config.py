"""The agent's configuration tree."""

import socket
from typing import Annotated, Literal

from pydantic import Field, SecretStr, model_validator

from kv_protocol.ids import WORKER_ID_PATTERN
from kv_runtime.config import NatsSection, Section, Settings, TelemetrySection
from kv_runtime.http import is_loopback


class WorkerSection(Section):
    """Who the worker is, and where it serves."""

    id: str = Field("worker-0", pattern=f"^{WORKER_ID_PATTERN}$", description="unique in the fleet, kept over restarts")
    role: Literal["aggregated", "prefill", "decode", "encode"] = Field("aggregated", description="phases it serves")
    host: str = Field("127.0.0.1", description="address to bind; anything but loopback needs worker.token")
    port: int = Field(0, ge=0, le=65535, description="0: any free one, which is advertised")
    advertise_host: str = Field("", description="host that routers use; empty: worker.host")
    token: SecretStr = Field(SecretStr(""), description="bearer token of the agent's HTTP; required beyond loopback")
    body_bytes_max: int = Field(64 << 20, ge=1024, le=1 << 30, description="larger bodies are refused with 413")
    inflight_requests_max: int = Field(4096, ge=1, le=1_000_000, description="beyond it requests are refused with 503")
    drain_s: float = Field(10.0, ge=0, le=3600, description="how long running requests may take after a stop")

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> "WorkerSection":
        if not is_loopback(self.host) and not self.token.get_secret_value():
            raise ValueError(f"host is {self.host}: beyond loopback a token is required")
        return self

    @property
    def advertised_host(self) -> str:
        """The host that stands in the registered address."""
        return self.advertise_host or (self.host if self.host != "0.0.0.0" else socket.gethostname())  # noqa: S104


class EngineSection(Section):
    """The engine; sizes are per rank."""

    kind: Literal["simulated"] = Field("simulated", description="which engine is served")
    model: str = Field("sim-8b", min_length=1, max_length=256, description="the model's name in requests")
    text: str = Field("byte", description="tokenizer and template: `byte`, or a local model directory")
    block_size: int = Field(32, ge=1, le=4096, description="tokens in a KV block")
    total_kv_blocks: int = Field(8192, ge=2, le=10_000_000, description="KV blocks of a rank; more keeps more prefixes")
    max_num_seqs: int = Field(256, ge=1, le=65_536, description="requests decoded together")
    max_num_batched_tokens: int = Field(8192, ge=1, le=1 << 20, description="tokens computed in one iteration")
    max_seq_len: int = Field(65_536, ge=2, le=1 << 22, description="prompt and answer together, in tokens")
    default_max_tokens: int = Field(128, ge=1, le=1 << 20, description="tokens generated where none are named")
    dp_ranks: int = Field(1, ge=1, le=64, description="attention-DP ranks, each a KV cache of its own")
    host_blocks: int = Field(0, ge=0, le=100_000_000, description="KV blocks of a rank in host memory; 0: no host tier")
    host_events: Literal["updated", "source"] = Field(
        "updated", description="who tells of the host tier: the engine (`updated` events), or a second source"
    )
    window_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), max_length=8, description="attention windows in tokens, one pool each; empty: max_seq_len alone"
    )
    window_blocks: int = Field(
        0, ge=0, le=10_000_000, description="KV blocks of each window narrower than max_seq_len; 0: total_kv_blocks"
    )
    seed: int = Field(0, ge=0, le=(1 << 64) - 1, description="of the simulated engine's tokens; equal in a fleet")
    speed: float = Field(1.0, gt=0, le=1000, description="simulated seconds a second; higher blurs measured latency")
    event_buffer_max_size: int = Field(100_000, ge=1, le=10_000_000, description="events kept until they are polled")

    @property
    def narrow_windows(self) -> tuple[int, ...]:
        """The attention windows but for the widest, in order."""
        return tuple(sorted(self.window_sizes))[:-1]

    @model_validator(mode="after")
    def _parts_fit(self) -> "EngineSection":
        windows, widest = self.window_sizes, max(self.window_sizes, default=self.max_seq_len)
        rules = [
            (self.host_events == "source" and not self.host_blocks, "host_events is source: host_blocks is 0"),
            (len(set(windows)) < len(windows), f"window_sizes: found {windows}, each allowed once"),
            (widest != self.max_seq_len, f"window_sizes: the widest is {widest}, not max_seq_len, {self.max_seq_len}"),
            (self.window_blocks and not self.narrow_windows, "window_blocks: window_sizes names no narrower window"),
        ]
        problems = [problem for is_broken, problem in rules if is_broken]
        if problems:
            raise ValueError("; ".join(problems))
        return self


class StreamsSection(Section):
    """What was read of an engine's events, on its way into the log; sizes are per rank."""

    outbox_bytes_max: int = Field(64 << 20, ge=1 << 20, le=1 << 34, description="memory for batches NATS did not take")
    batch_ring_bytes_max: int = Field(
        16 << 20, ge=0, le=1 << 34, description="memory for published batches, for readers that missed some"
    )


class EventsSection(StreamsSection):
    """The engine's events on their way out."""

    poll_s: float = Field(0.05, gt=0, le=10, description="longest wait of one poll; bounds how long a stop takes")
    attention_window: int = Field(
        0,
        ge=0,
        le=1 << 30,
        description="widest one, in tokens, where the engine's word is lost; 0: as events show",
    )
    ring_bytes_max: int = Field(64 << 20, ge=1 << 16, le=1 << 34, description="memory for replays on hop A")


class AgentSettings(Settings):
    """All of it."""

    worker: WorkerSection = WorkerSection()
    engine: EngineSection = EngineSection()
    events: EventsSection = EventsSection()
    nats: NatsSection = NatsSection(url="nats://127.0.0.1:4222")
    telemetry: TelemetrySection = TelemetrySection()

    @property
    def advertised_host(self) -> str:
        """The host that stands in the registered address."""
        return self.worker.advertised_host
