"""Streaming of events over ZMQ, where `kv_events_config` asks for it; polling then finds nothing.

    sockets    PUB, and ROUTER for replays where an endpoint is given; each attention-DP rank binds a tcp port + rank
    frames     topic | batches before this one, 8 bytes big-endian | msgpack of [time, [event...], rank]
    event      a map: BlockStored, BlockRemoved; `created` and `updated` have none, and only full blocks count
    hash       the first 8 bytes of the block's SHA-256, as a signed 64-bit int; adapters and salts are not told
    media      a block in which an item begins is not told: its digest is no token
    replay     [empty | topic | sequence | payload] of each batch that is kept, then [empty | empty | -1 | empty]
    refused    without KV cache manager V2; its backend must be Python (an environment variable); pipeline or context
               parallelism; from 1.4 on in any case
    time       the engine's own: iterations

Source: NVIDIA/TensorRT-LLM PR #17631 (`BlockStored`, `ZmqEventPublisher`, `StreamingKVCacheEventManager`,
`validate_streaming_support`; text 57357230020); `docs/source/features/kvcache.md` @ 0076e939 ("unsupported").
"""

import os
import threading
from collections import deque
from typing import Any

import msgspec
import zmq

from .control import control

Json = dict[str, Any]
_END = (b"", b"\xff" * 8, b"")
_POLL_MS = 20


class Streams:
    """The publishers of all ranks; without `endpoints` there are none."""

    def __init__(self, endpoints: list[str], replays: list[str], topic: str, kept: int) -> None:
        self._context = zmq.Context() if endpoints else None
        self._topic = topic.encode()
        self._kept: list[deque[tuple[bytes, bytes]]] = [deque(maxlen=kept) for _ in endpoints]
        self._sent = [0] * len(endpoints)
        self._sockets = [self._bound(zmq.PUB, endpoint) for endpoint in endpoints]
        self.endpoints = [socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") for socket in self._sockets]
        self._is_closed = threading.Event()
        self._answering = [
            threading.Thread(target=self._answer, args=(self._bound(zmq.ROUTER, endpoint), kept), daemon=True)
            for endpoint, kept in zip(replays, self._kept, strict=False)
        ]
        for thread in self._answering:
            thread.start()

    def _bound(self, kind: int, endpoint: str) -> Any:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(endpoint)
        return socket

    def _answer(self, socket: Any, kept: deque[tuple[bytes, bytes]]) -> None:
        while not self._is_closed.is_set():
            if not socket.poll(_POLL_MS):
                continue
            identity, _, start = socket.recv_multipart()
            for sequence, payload in list(kept):
                if sequence >= start:
                    socket.send_multipart([identity, b"", self._topic, sequence, payload])
            socket.send_multipart([identity, b"", *_END])

    @classmethod
    def of(cls, args: Any, ranks: int) -> "Streams":
        """Return the publishers that the engine's arguments ask for.

        Raises:
            ValueError: the engine cannot stream with them.
        """
        config = args.kv_cache_config.kv_events_config
        if config is None or not config.enable_kv_cache_events or config.publisher not in (None, "zmq"):
            return cls([], [], "", 0)
        if args.kv_cache_config.use_kv_cache_manager_v2 is not True:
            raise ValueError("kv_events_config requires kv_cache_config.use_kv_cache_manager_v2=True")
        if args.pipeline_parallel_size > 1 or args.context_parallel_size > 1:
            raise ValueError("streaming of KV events takes no pipeline parallelism and no context parallelism")
        if control.version.startswith("1.4"):
            raise ValueError("kv_events_config has no implementation: use kv_cache_config.event_buffer_max_size")
        if os.environ.get("TLLM_KV_CACHE_MANAGER_V2_BACKEND", "cpp") != "python":
            raise ValueError("streaming of KV events needs TLLM_KV_CACHE_MANAGER_V2_BACKEND=python")
        endpoints = [_of_rank(config.endpoint, rank) for rank in range(ranks)]
        replays = [_of_rank(config.replay_endpoint, rank) for rank in range(ranks)] if config.replay_endpoint else []
        return cls(endpoints, replays, config.topic, config.buffer_steps)

    def publish(self, engine: Any) -> None:
        """Publish each rank's visible events as one batch; a rank without any publishes nothing."""
        for number, socket in enumerate(self._sockets):
            visible = engine.ranks[number].events.visible
            events = [told for event in visible for told in _told(event, engine.args.kv_cache_config.tokens_per_block)]
            visible.clear()
            if events:
                payload = msgspec.msgpack.encode([float(engine.iterations), events, number])
                sequence = self._sent[number].to_bytes(8, "big")
                socket.send_multipart([self._topic, sequence, payload])
                self._kept[number].append((sequence, payload))
                self._sent[number] += 1

    def close(self) -> None:
        """Close all sockets."""
        self._is_closed.set()
        for thread in self._answering:
            thread.join()
        if self._context is not None and not self._context.closed:
            self._context.destroy(linger=0)


def _of_rank(endpoint: str, rank: int) -> str:
    head, _, port = endpoint.rpartition(":")
    if port.isdigit():
        return f"{head}:{int(port) + rank}"
    return endpoint if port == "*" or rank == 0 else f"{endpoint}_dp{rank}"


def _told(event: Json, block_size: int) -> list[Json]:
    data = event["data"]
    if data["type"] == "removed":
        hashes = [_signed(each) for each in data["block_hashes"]]
        return [{"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}]
    told: list[Json] = []
    parent = data.get("parent_hash")
    for block in data["blocks"] if data["type"] == "stored" else ():
        begins_item = any(key["start_offset"] == 0 for key in block["mm_keys"])
        if len(block["tokens"]) == block_size and not begins_item:
            told.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [_signed(block["block_hash"])],
                    "parent_block_hash": None if parent is None else _signed(parent),
                    "token_ids": [token["token_id"] for token in block["tokens"]],
                    "block_size": block_size,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                }
            )
        parent = block["block_hash"]
    return told


def _signed(block_hash: int | str) -> int:
    number = int(block_hash[:16], 16) if isinstance(block_hash, str) else block_hash
    return number - 2**64 if number >= 2**63 else number
