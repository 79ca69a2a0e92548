"""What vLLM and SGLang tell in their own event classes becomes, by the agent and the index, what a naive fold says.

The frames are recorded (`tests/golden/make_engine_frames.py`); `make engines` makes a thousand lives of each release.
"""

from itertools import count

import pytest

from indexer.native.index import NativeIndex
from tests.contract.indexes import held
from tests.golden.make_engine_frames import EngineFrames, read
from worker_agent.events.consolidation import Consolidation, Origin

LIVES = read()


@pytest.mark.parametrize("life", LIVES, ids=[f"{life.release} {life.seed}" for life in LIVES])
def test_the_index_holds_what_the_engine_holds(life: EngineFrames) -> None:
    ranks = tuple(range(len(life.held)))
    origins = [Origin(dp_rank=rank) for rank in ranks]
    core = Consolidation(ranks, life.block_size, "i", count(1).__next__, origins=origins, is_eagle=life.is_eagle)
    index = NativeIndex()
    for rank in ranks:
        index.register(rank)
    for sequence, frame in enumerate(life.frames):
        if frame.begins_anew:
            core.on_loss(origins[frame.dp_rank], began_anew=True)
        core.on_payload(sequence, frame.payload, origins[frame.dp_rank])
        while message := core.outboxes[frame.dp_rank].next_message():
            assert index.apply_batch(frame.dp_rank, message.payload, 0.0) == 0
            core.outboxes[frame.dp_rank].acknowledge(message)
    assert [core.stale(rank) for rank in ranks] == [""] * len(ranks)
    assert [{block: bits for block, (_, bits) in held(index, rank).items()} for rank in ranks] == life.held
