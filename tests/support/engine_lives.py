"""Random lives of an engine's cache, told in the engine's own event classes, and what is cached: a naive fold.

A life is computed from its seed. `step` returns what a rank tells of one iteration, as events of the engine's classes;
`held` what its cache has then: sequence hash -> bits of tiers. The fold knows each block by the prompt up to its end,
never by a hash of the engine, and counts its copies by medium and attention group.
"""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from kv_protocol.events import Tier
from kv_protocol.hashing import chain, hash_seed, local_block_hashes, mm_hash

STEPS = 12
_TIERS = {"GPU": Tier.GPU, "CPU": Tier.HOST, "CPU_PINNED": Tier.HOST, "STORAGE": Tier.DISK, "DISK": Tier.DISK}


class Block(NamedTuple):
    """A block by its content: the prompt up to its end, the tokens behind it that count, and what else keys it."""

    prompt: tuple[int, ...]
    lookahead: tuple[int, ...] = ()
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    items: tuple[tuple[str, ...], ...] = ()
    """The names of the media of each block so far."""

    @property
    def name(self) -> bytes:
        """Return a digest of the content, as the engine names the block."""
        return hashlib.sha256(repr(self).encode()).digest()


Copies = defaultdict[tuple[str, int], Counter[Block]]
"""By medium and attention group, the copies of each block."""


@dataclass
class Life(ABC):
    """A life: `ranks` caches of blocks of `block_size` tokens, keyed with `lookahead` tokens more."""

    random: Random
    block_size: int
    ranks: int
    lookahead: int = 0
    groups: tuple[int, ...] = (0,)
    prompts: list[list[int]] = field(default_factory=list)
    copies: list[Copies] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.copies = [defaultdict(Counter) for _ in range(self.ranks)]

    @abstractmethod
    def step(self, dp_rank: int) -> list[Any]:
        """Return the events of one iteration of a rank."""

    def begin_anew(self) -> None:
        """The engine restarted: its caches are empty."""
        self.__post_init__()

    def held(self, dp_rank: int) -> dict[int, int]:
        """Return what the rank's cache holds: sequence hash -> bits of tiers."""
        found: Counter[int] = Counter()
        for medium, tier in _TIERS.items():
            of_groups = [self.copies[dp_rank][medium, group] for group in self.groups]
            for block in of_groups[0]:
                if all(copies[block] for copies in of_groups):
                    found[self.sequence_hash(block)] |= 1 << tier
        return dict(found)

    def sequence_hash(self, block: Block) -> int:
        """Return the hash by which routers ask for the block."""
        seed, is_eagle = hash_seed(block.lora_name, block.cache_salt), self.lookahead > 0
        tokens = block.prompt + block.lookahead[:1]
        items = [[mm_hash(name) for name in names] for names in block.items]
        return chain(local_block_hashes(tokens, self.block_size, seed=seed, mm_hashes=items, is_eagle=is_eagle))[-1]

    def blocks_of_a_prompt(self, **keys: Any) -> list[Block]:
        """Return the blocks of a prompt that may begin like one before it."""
        began = self.random.choice(self.prompts) if self.prompts and self.random.random() < 0.7 else []
        began = began[: self.random.randint(0, len(began))]
        prompt = began + [self.random.randint(0, 3) for _ in range(self.random.randint(1, 4 * self.block_size))]
        self.prompts.append(prompt)
        ends = range(self.block_size, len(prompt) - self.lookahead + 1, self.block_size)
        return [Block(tuple(prompt[:end]), tuple(prompt[end : end + self.lookahead]), **keys) for end in ends]

    def some(self, blocks: list[Block], most: int) -> list[Block]:
        """Return a few of them, each once."""
        return self.random.sample(blocks, min(len(blocks), self.random.randint(1, most)))


class VllmLife(Life):
    """vLLM: copies that two requests computed at once, attention groups, offload tiers by name or with tokens, media.

    Source: vLLM 0.33.0, `vllm/v1/core/block_pool.py`, `vllm/v1/core/kv_cache_utils.py` (`to_event_extra_keys`),
    `vllm/distributed/kv_transfer/kv_connector/v1/offloading/events.py`, `vllm/v1/kv_offload/tiering/kvcr/manager.py`.
    """

    def __init__(self, seed: str, kv_events: Any) -> None:
        random = Random(seed)
        self._events = kv_events
        self._is_new = "lookahead_token_ids" in kv_events.BlockStored.__struct_fields__
        super().__init__(
            random,
            block_size=random.choice([1, 2, 4]),
            ranks=random.choice([1, 1, 2]),
            lookahead=random.choice([0, 0, 1, 2]) if self._is_new else 0,
            groups=random.choice([(0,), (0,), (0, 2)]),
        )
        self._has_int_names = random.random() < 0.5

    def step(self, dp_rank: int) -> list[Any]:
        """Return stores and removals as the block pool and the offload manager queue them."""
        choice = self.random.random()
        if choice < 0.03:
            self.copies[dp_rank].clear()
            return [self._events.AllBlocksCleared()]
        if choice < 0.55:
            return list(self._computed(dp_rank))
        return list(self._evicted(dp_rank) if choice < 0.8 else self._offloaded(dp_rank))

    def _computed(self, dp_rank: int) -> Iterator[Any]:
        lora_name = "law" if self.random.random() < 0.2 else None
        blocks = self.blocks_of_a_prompt(lora_name=lora_name)
        if self.random.random() < 0.2:
            item = self.random.choice(["b" * 64, "picture-7"])
            blocks = [each._replace(items=((item,),) * (at + 1)) for at, each in enumerate(blocks)]
        gpu = [self.copies[dp_rank]["GPU", group] for group in self.groups]
        hits = next((at for at, each in enumerate(blocks) if not all(c[each] for c in gpu)), len(blocks))
        for _ in range(1 + (self.random.random() < 0.2)):  # two requests at once
            yield from self._stored(dp_rank, blocks, hits, "GPU")
        if self.random.random() < 0.3 and blocks[hits:]:  # a window's group, which does not count
            window = self._store(blocks, hits, "GPU", 1) | {"kv_cache_spec_kind": "sliding_window"}
            yield self._events.BlockStored(**window)
            yield self._events.BlockRemoved(block_hashes=[self._named(blocks[-1])], medium="GPU", group_idx=1)

    def _stored(self, dp_rank: int, blocks: list[Block], first: int, medium: str, **more: Any) -> Iterator[Any]:
        for group in self.groups if blocks[first:] else ():
            self.copies[dp_rank][medium, group].update(blocks[first:])
            yield self._events.BlockStored(**self._store(blocks, first, medium, group) | more)

    def _store(self, blocks: list[Block], first: int, medium: str, group: int) -> dict[str, Any]:
        stored, size = blocks[first:], self.block_size
        new: dict[str, Any] = {"session_id": self.random.choice([None, "s-1"])} if self._is_new else {}
        if self.lookahead:
            new |= {"lookahead_token_ids": [list(each.lookahead) for each in stored]}
        keys = [
            (*([each.lora_name] if each.lora_name else []), *((name, 0) for name in each.items[-1:] and each.items[-1]))
            for each in stored
        ]
        return {
            "block_hashes": [self._named(each) for each in stored],
            "parent_block_hash": self._named(blocks[first - 1]) if first else None,
            "token_ids": list(stored[-1].prompt[first * size :]),
            "block_size": size,
            "lora_id": 1 if stored[0].lora_name else None,
            "medium": medium,
            "lora_name": stored[0].lora_name,
            "extra_keys": [each or None for each in keys],
            "group_idx": group,
            "kv_cache_spec_kind": "full_attention",
            **new,
        }

    def _named(self, block: Block) -> bytes | int:
        return int.from_bytes(block.name[-8:], "big") if self._has_int_names else block.name

    def _evicted(self, dp_rank: int) -> Iterator[Any]:
        for (medium, group), copies in list(self.copies[dp_rank].items()):
            gone = self.some(sorted(+copies, key=str), 4)
            if gone and self.random.random() < 0.5:
                copies.subtract(gone)
                removal = {"block_hashes": list(map(self._named, gone)), "medium": medium, "group_idx": group}
                yield self._events.BlockRemoved(**removal | self._owner(medium))

    def _offloaded(self, dp_rank: int) -> Iterator[Any]:
        gpu = [self.copies[dp_rank]["GPU", group] for group in self.groups]
        medium = self.random.choice(["CPU", "STORAGE"] if self._is_new else ["CPU"])
        for block in self.some([each for each in sorted(+gpu[0], key=str) if all(c[each] for c in gpu)], 3):
            for group in self.groups:
                self.copies[dp_rank][medium, group][block] += 1
                named: dict[str, Any] = {
                    "block_hashes": [self._named(block)],
                    "parent_block_hash": None,
                    "token_ids": [],
                }
                named |= {"block_size": 0, "lora_id": None, "lora_name": None, "medium": medium, "group_idx": group}
                yield self._events.BlockStored(**named | self._owner(medium))
            if self._is_new:
                yield self._events.BlockStored(**named | {"medium": "STORAGE", "locality": "REMOTE"})

    def _owner(self, medium: str) -> dict[str, Any]:
        if not self._is_new or medium == "GPU":
            return {}
        return self.random.choice([{}, {"locality": "LOCAL"}, {"ownership": "kvcr"}])


class _Key:
    """A page of a radix tree, as its nodes have it."""

    def __init__(self, block: Block, block_size: int, *, is_bigram: bool) -> None:
        self.token_ids = array("q", block.prompt[-block_size:] + block.lookahead[:1])
        self.extra_key, self.cache_salt, self.is_bigram = block.extra_key, block.cache_salt, is_bigram

    def __len__(self) -> int:
        return len(self.token_ids) - self.is_bigram

    def hash_page(self, start: int, end: int, prior: str | None) -> str:
        """Return the page's hash, as 0.5.14 asks for it."""
        del start, end
        return hashlib.sha256(bytes.fromhex(prior or "") + bytes(self.token_ids)).hexdigest()


class _Node:
    """A node of one page; the root has no key to speak of."""

    def __init__(self, key: _Key | None, parent: "_Node | None") -> None:
        self.key, self.parent = key or (), parent
        self.hash_value: list[str] | None = None if key else []
        self.event_hash_value: list[str] | None = None if key else []


def _page_hashes(key: _Key, prior: bytes | None, page_size: int) -> list[str]:
    """Return the hashes of a key's one page, as 0.5.23 computes them in C++."""
    return [key.hash_page(0, page_size, (prior or b"").hex())]


class SglangLife(Life):
    """SGLang: a radix tree told by the release's own recorder; a host tier; bigrams; adapters, salts, extra keys.

    Source: SGLang 0.5.23, `python/sglang/srt/mem_cache/events.py` (`KVCacheEventRecorder`; 0.5.14: its mixin),
    `mem_cache/utils.py` (`compute_node_event_hash_values`: an `extra_key` is not in the hash).
    """

    def __init__(self, seed: str, modules: dict[str, Any]) -> None:
        random = Random(seed)
        modules["utils"].get_native_hash = _page_hashes
        self._is_new = hasattr(modules["events"], "KVCacheEventRecorder")
        size, self._is_bigram = random.choice([1, 2, 4]), random.random() < 0.3
        super().__init__(random, size, random.choice([1, 1, 2]), lookahead=int(self._is_bigram))
        self._host = modules["kv_events"].StorageMedium.CPU
        is_dynamo = random.random() < 0.3
        self._recorders = [_recorder(modules["events"], size, is_dynamo=is_dynamo) for _ in range(self.ranks)]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._nodes: list[dict[Block, _Node]] = [{} for _ in range(self.ranks)]

    def step(self, dp_rank: int) -> list[Any]:
        """Return what the recorder has of some requests and evictions."""
        recorder, gpu = self._recorders[dp_rank], self.copies[dp_rank]["GPU", 0]
        host, choice = self.copies[dp_rank]["CPU_PINNED", 0], self.random.random()
        if choice < 0.03:
            self.copies[dp_rank].clear()
            self._nodes[dp_rank].clear()
            recorder.record_all_cleared()
        elif choice < 0.6:
            for _ in range(self.random.randint(1, 3)):
                self._compute(dp_rank, gpu)
        elif choice < 0.8:
            for block in self._leaves(gpu):
                gpu[block] -= 1
                recorder.record_remove(self._nodes[dp_rank][block])
        else:
            for block in self.some(sorted((+gpu).keys() - (+host).keys(), key=str), 3):
                host[block] += 1
                recorder.record_store(self._nodes[dp_rank][block], self._host)
            for block in self.some(sorted(+host, key=str), 2) if self.random.random() < 0.3 else ():
                host[block] -= 1
                recorder.record_remove(self._nodes[dp_rank][block], self._host)
        return list(recorder.take())

    def _compute(self, dp_rank: int, gpu: Counter[Block]) -> None:
        keys: dict[str, Any] = {"extra_key": self.random.choice([None, "tenant-a", "tenant-b"])}
        if self._is_new and self.random.random() < 0.3:
            keys |= {"cache_salt": "s1"}
        if self._is_new and self.random.random() < 0.2:
            keys |= {"lora_name": "law", "extra_key": _LORA_KEY}
        nodes, above = self._nodes[dp_rank], _Node(None, None)
        for block in self.blocks_of_a_prompt(**keys):
            key = _Key(block, self.block_size, is_bigram=self._is_bigram)
            node = nodes.setdefault(block, _Node(key, above))
            if not gpu[block]:
                gpu[block] += 1
                self._recorders[dp_rank].record_store(node)
            above = node

    def _leaves(self, gpu: Counter[Block]) -> list[Block]:
        inner = {block._replace(prompt=block.prompt[: -self.block_size], lookahead=()) for block in +gpu}
        return self.some(sorted((each for each in +gpu if each._replace(lookahead=()) not in inner), key=str), 4)


_LORA_ID = "0" * 32
_LORA_KEY = "k" + _LORA_ID


class _Recorder0514:
    """The mixin of 0.5.14 with the calls of 0.5.23."""

    def __init__(self, mixin: type, page_size: int) -> None:
        self._mixed = type("Mixed", (mixin,), {})()
        fields = {"enable_kv_cache_events": True, "page_size": page_size, "kv_event_queue": [], "root_node": None}
        vars(self._mixed).update(fields)
        self._store, self.record_remove, self.record_all_cleared = (
            getattr(self._mixed, f"_record_{what}_event") for what in ("store", "remove", "all_cleared")
        )
        self.take = self._mixed.take_events

    def record_store(self, node: _Node, medium: object = None) -> None:
        """Record it; the parent of a first page is the root."""
        self._mixed.root_node = node.parent if node.parent is not None and node.parent.parent is None else None
        self._store(node, medium)


def _recorder(events: Any, page_size: int, *, is_dynamo: bool) -> Any:
    if not hasattr(events, "KVCacheEventRecorder"):
        return _Recorder0514(events.KVCacheEventMixin, page_size)
    recorder = events.KVCacheEventRecorder(enabled=True, page_size=page_size, dynamo_format=is_dynamo)
    vars(recorder.lora_names)["_names"][_LORA_KEY] = "law"
    recorder.lora_names.register(lora_id=_LORA_ID, lora_name="law")
    return recorder


def life_of(release: str, seed: int, modules: dict[str, Any]) -> Life:
    """Return a life of a release of which these modules were read (`engine_wheels`)."""
    name = f"{release} {seed}"
    return VllmLife(name, modules["kv_events"]) if release.startswith("vllm") else SglangLife(name, modules)
