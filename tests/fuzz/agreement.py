"""Runs the fuzzers' inputs on two implementations and compares results and final state.

libFuzzer keeps inputs that cover new code of the native tree, so a few inputs cover most of it.
"""

import msgspec

from indexer.index.prefix_index import PrefixIndex
from indexer.index.snapshot import unseal
from kv_protocol.events import TIERS
from kv_protocol.recovery import HeldBlock
from tests.contract.whole_tree import whole_tree
from tests.fuzz.programs import MakeIndex, Outcome, Program, restored
from tests.reference.index.snapshot import read_body


def _known(index: PrefixIndex) -> dict[str, Outcome]:
    """Return the state on which implementations must agree; not store times, which are upper bounds."""
    saved = read_body(unseal(index.snapshot()))
    return {
        "ranks": saved.ranks,
        "digests": [index.digest(rank, tier) for rank in saved.ranks for tier in TIERS],
        "dumps": [_dumped(index, rank) for rank in saved.ranks],
        "parked blocks": saved.parked,
        "tree": whole_tree(index),
        "statistics": msgspec.structs.replace(index.statistics(), memory_bytes=0),
        "self-check": index.self_check(),
    }


def _dumped(index: PrefixIndex, rank: int) -> dict[int, HeldBlock]:
    return {block.sequence_hash: block for columns in index.dump(rank) for block in columns.blocks()}


def _did(fuzzer: str, make_index: MakeIndex, data: bytes) -> dict[str, Outcome]:
    if fuzzer == "restore":
        index, outcomes = restored(make_index, data)
    else:
        program = Program(make_index, data)
        outcomes, index = program.run(), program.index
    return {"outcomes": outcomes, **_known(index)}


def differences(fuzzer: str, data: bytes, one: MakeIndex, other: MakeIndex) -> list[str]:
    """Return the differences of two implementations after an input of `fuzzer`; any is a bug of one of them."""
    did, did_other = _did(fuzzer, one, data), _did(fuzzer, other, data)
    return [what for what in did if did[what] != did_other[what]]
