"""An engine's own server, as `worker-agent attach` meets it: what differs from one engine to the next.

To add an engine, write a subclass of `EngineServer` in a file of its own here, and its double in a file of its own in
`tests/system/integration/engine_doubles/`. They are found there: settings, help and `docs/reference/engines.md` name
the engine, and tests of all engines run with it. The agent asks every engine in the same way:

    GET /health         status 200: the engine is, or becomes, a worker of the fleet
    GET /v1/models      `data`, a list of cards: a model's has `id`, `owned_by`, and perhaps `max_model_len` and `root`;
                        an adapter's has the model's `id` as its `parent`
    GET /openapi.json   if there is one, its `paths` are the endpoints; else the engine serves chat and completions
    GET /metrics        the load, as Prometheus text
    KV events           ZMQ frames in vLLM's dialect, which SGLang speaks, too (`events/dialects/batches.py`); or
                        `POST /kv_cache_events`, polled, in TensorRT-LLM's dialect
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

import msgspec
from prometheus_client import samples
from prometheus_client.parser import text_string_to_metric_families

from kv_protocol.errors import UNDECODABLE, MalformedMessage

T = TypeVar("T")
Sample = samples.Sample
"""One line of an engine's metrics: `name`, `labels`, `value`."""

POLL = "poll"
"""Replaces an address of KV events if the engine is polled for them."""
NO_EVENTS_ENDPOINT = "none"
"""Replaces an address of KV events if the engine publishes none."""
PATH_CHARACTERS_MAX = 4096
KV_BLOCKS_MAX = 100_000_000
SEQS_MAX = 65_536
TOKENS_MAX = 1 << 22


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine states of itself. A missing fact is empty or 0. Sizes are per rank.

    `kind`, names, adapters (`loras`), endpoints, `max_seq_len` and for some engines `directory` come from the answers
    that all engines give, the rest from `EngineServer.info`. `dp_ranks` is the number of data-parallel ranks;
    `directory` is the model's, as the engine was given it: a path, or a repository on the hub. `publish_endpoint` is
    the event socket of rank 0 as the engine binds it, or every rank's, between commas; `NO_EVENTS_ENDPOINT` if the
    engine publishes no events. Empty: the agent assumes `EngineServer.events`.
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
    """A source of facts that not every engine states in the same way.

    `read` gets the body of the first of `paths` in which it finds any fact; without paths, the body of the metrics. It
    raises `MalformedMessage` for a body of another form. `/v1/models` can be one of the paths.
    """

    read: Callable[[bytes], EngineFacts]
    paths: tuple[str, ...] = ()


class MetricNames(NamedTuple):
    """The names of an engine's metrics, all with `prefix`; empty: the engine has no such metric.

    `running` and `waiting` are needed for a load; the rest is 0 if it is missing. Blocks in use are `used_blocks`, else
    `used_tokens`, else all blocks times the first existing ratio of `usage`. All blocks are `total_blocks`, else
    `total_tokens`, else `EngineFacts.total_kv_blocks`. `total_blocks_label`: the total is the number in this label, not
    the value. `rank_label` is the label with the number of the rank. `others` are read for `EngineServer.is_asleep`.
    """

    prefix: str
    running: str
    waiting: str
    usage: tuple[str, ...] = ()
    rank_label: str = ""
    used_tokens: str = ""
    total_tokens: str = ""
    used_blocks: str = ""
    total_blocks: str = ""
    total_blocks_label: str = ""
    others: tuple[str, ...] = ()

    @property
    def all(self) -> frozenset[str]:
        """Every name that is read."""
        named = (self.running, self.waiting, *self.usage, self.used_tokens, self.total_tokens, self.used_blocks)
        return frozenset(filter(None, (*named, self.total_blocks, *self.others)))


class EngineServer:
    """One engine's server: a subclass for each, whose docstring tells operators how to start it and what is special.

    A field without a default must be set. `docs/reference/engines.md` shows the fields and the docstring.
    """

    name: ClassVar[str]
    """Its value of the setting `engine.kind`, and NAME in the router's `--worker URL,engine=NAME`."""
    owned_by: ClassVar[str]
    """`owned_by` in its models' cards at /v1/models, by which the engine is recognized."""
    states_directory: ClassVar[bool] = False
    """Whether `root` in those cards is the model's directory."""
    event_source: ClassVar[str]
    """`event_source` of its registration, a name for people; `trtllm` if it speaks TensorRT-LLM's dialect."""
    events: ClassVar[str] = "tcp://*:5557"
    """Where it publishes events by default, or `POLL`. Source of the port: `docs/SOURCES.md` E3.5."""
    event_flag: ClassVar[str] = ""
    """The flag with which it publishes events; empty: operators are shown none."""
    block_size: ClassVar[int]
    """Tokens of a block by default."""
    metrics: ClassVar[MetricNames]
    """The metrics from which its load is read. The agent shows all metrics that have their prefix."""
    metrics_answer_s: ClassVar[float] = 2.0
    """Longest time in seconds for an answer with its metrics, or with the events of a polled engine."""
    rank_header: ClassVar[str] = ""
    """The header in which a request names the data-parallel rank that serves it; empty: the engine chooses the rank."""
    stream_format: ClassVar[str] = ""
    """`vllm` if its streams state token ids as vLLM's do, so that they can resume elsewhere; empty: they do not."""
    info: ClassVar[tuple[Info, ...]] = ()
    """Sources of further facts. If several state a fact, the first counts."""

    def is_asleep(self, samples: Iterable[Sample]) -> bool:
        """Return whether its metrics state that it computes nothing until it is woken."""
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


def samples_in(body: bytes, names: Iterable[str]) -> list[Sample]:
    """Return the samples of `names` in Prometheus text; raise `MalformedMessage` for an unreadable one.

    An engine has thousands of lines. A skipped line costs a comparison of its first characters, and cannot make the
    rest unreadable.
    """
    openings = tuple(f"{name}{after}" for name in names for after in "{ \t")
    text = body.decode("utf-8", errors="replace")
    selected = [line for line in text.splitlines() if line.startswith(openings)]
    try:
        families = list(text_string_to_metric_families("\n".join([*selected, ""])))
    except (ValueError, LookupError) as error:
        raise MalformedMessage(0, f"metrics: {error}") from error
    return [sample for family in families for sample in family.samples]


def label_count(labels: Mapping[str, str], name: str) -> int:
    """Return the number in a label; 0 if it is `None` or not a number."""
    text = labels.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < len(str(1 << 53)) else 0
