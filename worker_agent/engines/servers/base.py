"""An engine's own server, as `worker-agent attach` meets it: what differs from one engine to the next.

All answer GET /health, /v1/models and /openapi.json in the same shape (`attached/client.py`); revisions that were read
are in `docs/ATTACH.md`.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec

from kv_protocol.errors import UNDECODABLE, MalformedMessage
from worker_agent.load.engine_metrics import MetricNames, Sample

T = TypeVar("T")

POLL = "poll"
"""Stands for the address of the event sockets of an engine that is polled for its events."""
NO_EVENTS_ENDPOINT = "none"
"""Stands for that address where the engine has no events."""
PATH_CHARACTERS_MAX = 4096
KV_BLOCKS_MAX = 100_000_000
SEQS_MAX = 65_536
TOKENS_MAX = 1 << 22


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself; a missing fact is empty or 0, and sizes are per rank.

    `dp_ranks` is the number of ranks; `directory` is as the engine was given it: a path, or a repository on the hub.
    `publish_endpoint` is the event socket of rank 0 as the engine binds it, or every rank's, between commas;
    `NO_EVENTS_ENDPOINT` where it has none.
    """

    kind: str = ""
    directory: str = ""
    publish_endpoint: str = ""
    replay_endpoint: str = ""
    served_names: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    block_size: int = 0
    total_kv_blocks: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_seq_len: int = 0
    dp_ranks: int = 0
    version: str = ""
    api_endpoints: tuple[str, ...] = ()

    def with_more(self, other: "EngineFacts") -> "EngineFacts":
        """Return both combined; if both have a fact, this one's counts."""
        mine = {name: value for name, value in msgspec.structs.asdict(self).items() if value}
        return msgspec.structs.replace(other, **mine)


class Info(NamedTuple):
    """A source of facts: `read` finds them in the answer of the first path that has any; without paths in the metrics.

    `read` raises `MalformedMessage` for a body of another form.
    """

    read: Callable[[bytes], EngineFacts]
    paths: tuple[str, ...] = ()


class EngineServer:
    """One engine's server. To add an engine, subclass this in a file of its own here, where `SERVERS` finds it."""

    name: ClassVar[str]
    """Of the setting `engine.kind` and of the router's `--worker URL,engine=NAME`."""
    owned_by: ClassVar[str]
    """Of its models' cards at /v1/models, by which the engine is recognized."""
    states_directory: ClassVar[bool] = False
    """Whether the `root` of such a card is the model's directory."""
    event_source: ClassVar[str]
    """`event_source` of its registration, by which the router knows whether its answers can be continued."""
    events: ClassVar[str] = "tcp://*:5557"
    """Where it publishes events unless told otherwise; `POLL`. Source of the port: `docs/SOURCES.md` E3.5."""
    event_flag: ClassVar[str] = ""
    """The flag with which it publishes events; empty: operators are told none."""
    block_size: ClassVar[int]
    """Tokens of a block unless told otherwise."""
    metrics: ClassVar[MetricNames]
    metrics_answer_s: ClassVar[float] = 2.0
    """The longest that an answer with its metrics, or with the events of a polled engine, may take."""
    takes_rank: ClassVar[bool] = True
    """Whether a request can name the data-parallel rank that serves it."""
    stream_words: ClassVar[str] = ""
    """The format in which its streams tell token ids (`WorkerRegistered.stream_token_ids`); empty: they do not."""
    info: ClassVar[tuple[Info, ...]]
    """The facts that not every engine's server states in the same way; the first that states one counts."""

    def is_asleep(self, samples: Iterable[Sample]) -> bool:
        """Return whether its metrics say that it computes nothing until it is woken."""
        del samples
        return False

    def iterations(self, body: bytes) -> list[dict[str, Any]] | None:
        """Return the rows of iteration statistics in its metrics; None: they are Prometheus text.

        Raises:
            MalformedMessage: they are neither.
        """
        del body
        return None


class _Version(msgspec.Struct):
    version: Annotated[str, msgspec.Meta(max_length=256)]


def facts_of_version(body: bytes) -> EngineFacts:
    """Return the facts of `GET /version`, of vLLM and TensorRT-LLM; raise `MalformedMessage`."""
    return EngineFacts(version=decoded(_Version, body, "/version").version)


def decoded(shape: type[T], body: bytes, path: str) -> T:
    """Return the decoded answer of `path`; raise `MalformedMessage`, which names the path and the field."""
    try:
        return msgspec.json.decode(body, type=shape)
    except UNDECODABLE as error:
        raise MalformedMessage(0, f"{path}: {error}") from error


def within(value: object, greatest: int) -> int:
    """Return a count that may be registered; 0, as if it were not stated, for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= greatest else 0
