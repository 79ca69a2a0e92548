"""Cuts a capture to its first rounds, small enough for the repository: `python cut_capture.py FROM TO ROUNDS`.

Token ids are relabelled along the trie of all token sequences: at each branch the sequences that part get 0, 1, 2, ...
in the order in which they come. Two sequences have a prefix in common after it exactly as long as before it, so the
blocks, what is found, and every figure stay the same; and the tokens, now mostly zeros, pack into almost nothing.
"""

import gzip
import itertools
import sys
from pathlib import Path
from typing import Any

import msgspec

ROOT = 0


class TokenTrie:
    def __init__(self) -> None:
        self._child_of: dict[tuple[int, int], tuple[int, int]] = {}
        self._children: dict[int, int] = {}
        self._new_node = itertools.count(ROOT + 1)

    def relabel(self, tokens: list[int], node: int = ROOT) -> tuple[list[int], list[int]]:
        """Return the new labels of `tokens` that follow `node`, and the node after each."""
        labels, nodes = [], []
        for token in tokens:
            if (node, token) not in self._child_of:
                label = self._children.get(node, 0)
                self._children[node] = label + 1
                self._child_of[node, token] = label, next(self._new_node)
            label, node = self._child_of[node, token]
            labels.append(label)
            nodes.append(node)
        return labels, nodes


def cut(capture: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return the first `rounds` rounds of a capture whose stores are all of full text blocks."""
    requests = [request for request in capture["requests"] if request["round"] < rounds]
    end_s = max(request["t"] for request in requests)
    trie, node_of = TokenTrie(), dict[int, int]()
    frames = []
    for time_s, (topic, sequence, payload) in capture["frames"]:
        if time_s <= end_s:
            frames.append([time_s, [topic, sequence, _relabelled(payload, trie, node_of, capture["block_size"])]])
    for request in requests:
        labels, _ = trie.relabel(request["prompt"] + request["output"])
        length = len(request["prompt"])
        request["prompt"], request["output"] = labels[:length], labels[length:]
    return {**capture, "frames": frames, "requests": requests}


def _relabelled(payload: bytes, trie: TokenTrie, node_of: dict[int, int], block_size: int) -> bytes:
    time_s, events, dp_rank = msgspec.msgpack.decode(payload)
    for event in events:
        if event["type"] == "BlockStored":
            parent = event["parent_block_hash"]
            labels, nodes = trie.relabel(event["token_ids"], ROOT if parent is None else node_of[parent])
            event["token_ids"] = labels
            node_of.update(zip(event["block_hashes"], nodes[block_size - 1 :: block_size], strict=True))
    return msgspec.msgpack.encode([time_s, events, dp_rank])


def main() -> None:
    source, target, rounds = sys.argv[1:]
    capture = msgspec.msgpack.decode(gzip.decompress(Path(source).read_bytes()))
    packed = msgspec.msgpack.encode(cut(capture, int(rounds)))
    Path(target).write_bytes(gzip.compress(packed, 9, mtime=0))


if __name__ == "__main__":
    main()
