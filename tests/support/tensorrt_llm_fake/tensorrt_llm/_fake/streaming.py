"""Streaming of events over ZMQ, where `kv_events_config` asks for it; polling then finds nothing.

    socket     PUB, bound to the endpoint; each attention-DP rank binds a tcp port + rank, with `:*` a free one each
    frames     topic | batches before this one, 8 bytes big-endian | msgpack of [time, [event...], rank]
    event      a map: BlockStored, BlockRemoved; hashes as signed 64-bit ints; `created` and `updated` have none
    time       the engine's own: iterations

The events' fields are those that all readers of such streams know (`docs/SOURCES.md` E3.1, E3.2, E3.5); no
recording of this engine's stream was seen. No replay socket. Needs KV cache manager V2, as the real one.
"""

from typing import Any

import msgspec
import zmq

Json = dict[str, Any]


class Streams:
    """The publishers of all ranks; without `endpoints` there are none."""

    def __init__(self, endpoints: list[str], topic: str) -> None:
        self._context = zmq.Context() if endpoints else None
        self._sockets: list[Any] = []
        self._sent = [0] * len(endpoints)
        self._topic = topic.encode()
        self.endpoints: list[str] = []
        for endpoint in endpoints:
            assert self._context is not None
            socket = self._context.socket(zmq.PUB)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(endpoint)
            self._sockets.append(socket)
            self.endpoints.append(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))

    @classmethod
    def of(cls, cache_config: Any, ranks: int) -> "Streams":
        """Return the publishers that a KV cache configuration asks for.

        Raises:
            ValueError: it does not ask for KV cache manager V2.
        """
        config = cache_config.kv_events_config
        if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
            return cls([], "")
        if cache_config.use_kv_cache_manager_v2 is not True:
            raise ValueError("kv_events_config requires kv_cache_config.use_kv_cache_manager_v2=True")
        return cls([_of_rank(config.endpoint, rank) for rank in range(ranks)], config.topic)

    def publish(self, engine: Any) -> None:
        """Publish each rank's visible events as one batch; a rank without any publishes nothing."""
        for number, socket in enumerate(self._sockets):
            visible = engine.ranks[number].events.visible
            events = [told for event in visible for told in _told(event, engine.args.kv_cache_config.tokens_per_block)]
            visible.clear()
            if events:
                payload = msgspec.msgpack.encode([float(engine.iterations), events, number])
                socket.send_multipart([self._topic, self._sent[number].to_bytes(8, "big"), payload])
                self._sent[number] += 1

    def close(self) -> None:
        """Close all sockets."""
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
        return [{"type": "BlockRemoved", "block_hashes": [_signed(each) for each in data["block_hashes"]]}]
    if data["type"] != "stored":
        return []
    full = [block for block in data["blocks"] if len(block["tokens"]) == block_size]
    if not full:
        return []
    tokens = [token["token_id"] for block in full for token in block["tokens"]]
    return [
        {
            "type": "BlockStored",
            "block_hashes": [_signed(block["block_hash"]) for block in full],
            "parent_block_hash": None if data["parent_hash"] is None else _signed(data["parent_hash"]),
            "token_ids": tokens,
            "block_size": block_size,
            "medium": "GPU",
            "group_idx": event.get("layer_group_id", 0),
            "cache_salt": full[0]["cache_salt"],
        }
    ]


def _signed(block_hash: int) -> int:
    return block_hash - 2**64 if block_hash >= 2**63 else block_hash
