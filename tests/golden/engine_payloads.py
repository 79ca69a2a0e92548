"""Payloads of hop A in every dialect, as bytes that our encoder did not write, and what they say.

Source: `docs/SOURCES.md` E3.7; frames of a vLLM publisher, captured; and bytes written by hand from the sources
that they name.
"""

from typing import NamedTuple

from kv_protocol.events import Tier
from kv_protocol.hashing import Namespace
from worker_agent.events.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

U64 = 2**64


class Golden(NamedTuple):
    """A payload in hex, what it says, and how many of its events mean nothing here."""

    payload: str
    dp_rank: int | None
    events: tuple[EngineEvent, ...]
    ignored: int = 0
    time_s: float = 1.5


FOUR = (1, 2, 3, 4)
EIGHT = (1, 2, 3, 4, 5, 6, 7, 8)
OF_TENANT = Namespace(cache_salt="tenant-a")
SEVEN = EngineStored(block_hashes=(7,), parent_block_hash=None, token_ids=FOUR, block_size=4)

# ------------------------------------------------------------------------------------------------ section 3.7
TRTLLM_STORED = (
    "93 cb3ff8000000000000"  # [1.5,
    "91 85 a474797065 ab426c6f636b53746f726564"  # [{"type": "BlockStored",
    "ac626c6f636b5f686173686573 92 fb 06"  # "block_hashes": [-5, 6],
    "b1706172656e745f626c6f636b5f68617368 c0"  # "parent_block_hash": nil,
    "a9746f6b656e5f696473 98 0102030405060708"  # "token_ids": [1..8],
    "aa626c6f636b5f73697a65 04 00"  # "block_size": 4}], 0]
)
TRTLLM_REMOVED = "93cb3ff80000000000009182a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391fb01"
VLLM_STORED = (
    "93cb3ff80000000000009188a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739107"
    "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504"
    "a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c000"
)
VLLM_ARRAY = "93cb3ff8000000000000919aab426c6f636b53746f7265649107c0940102030404c0a3475055c0c0c000"
CLEARED = "93cb3ff80000000000009181a474797065b0416c6c426c6f636b73436c656172656400"

FIXTURES = {
    "TensorRT-LLM polled, stored": Golden(
        TRTLLM_STORED,
        0,
        (EngineStored(block_hashes=(U64 - 5, 6), parent_block_hash=None, token_ids=EIGHT, block_size=4),),
    ),
    "TensorRT-LLM polled, removed": Golden(TRTLLM_REMOVED, 1, (EngineRemoved(block_hashes=(U64 - 5,)),)),
    "vLLM 0.24, stored": Golden(VLLM_STORED, 0, (SEVEN,)),
    "vLLM, arrays in a 3-array": Golden(VLLM_ARRAY, 0, (SEVEN,)),
    "cleared": Golden(CLEARED, 0, (EngineCleared(),)),
}

# -------------------------------------------------------------------------------------------------- captured
VLLM_CAPTURED_STORED = (
    "93cb41dac034c8287b22918ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cfa386de42b13cdd56b1706172"
    "656e745f626c6f636b5f68617368cfb61ceb6432a141eea9746f6b656e5f696473dc0010cdcf1dcd192acdcf1dcd192acdcf1dcd192acdcf"
    "1dcd192acdcf1dcd192acdcf1dcd192acdcf1dcd192acdcf1dcd192aaa626c6f636b5f73697a6510a76c6f72615f6964c0a66d656469756d"
    "a3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b69"
    "6e64ae66756c6c5f617474656e74696f6e00"
)
VLLM_CAPTURED_REMOVED = (
    "93cb41dac034e536a9c49184a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf66fadb67cd2022b1a66d65"
    "6469756da3475055a967726f75705f6964780000"
)
VLLM_CAPTURED_BOTH = (
    "93cb41dac034e4798ba39284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cfc06e38312d124d49a66d65"
    "6469756da3475055a967726f75705f696478008ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf29620535"
    "f92524abb1706172656e745f626c6f636b5f68617368cfa031bb7dd90e90d1a9746f6b656e5f696473dc0020cd5c08cdab92cd5c08cdab92"
    "cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c"
    "08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92cd5c08cdab92aa626c6f636b5f73697a6520a76c6f72615f6964c0a66d656469756d"
    "a3475055a96c6f72615f6e616d65c0aa65787472615f6b65797391c0a967726f75705f69647800b26b765f63616368655f737065635f6b69"
    "6e64ae66756c6c5f617474656e74696f6e00"
)
CAPTURED = {
    "vLLM captured, stored": Golden(
        VLLM_CAPTURED_STORED,
        0,
        (
            EngineStored(
                block_hashes=(0xA386DE42B13CDD56,),
                parent_block_hash=0xB61CEB6432A141EE,
                token_ids=(0xCF1D, 0x192A) * 8,
                block_size=16,
            ),
        ),
        time_s=1795216160.6325154,
    ),
    "vLLM captured, removed": Golden(
        VLLM_CAPTURED_REMOVED, 0, (EngineRemoved(block_hashes=(0x66FADB67CD2022B1,)),), time_s=1795216276.8541117
    ),
    "vLLM captured, removed and stored": Golden(
        VLLM_CAPTURED_BOTH,
        0,
        (
            EngineRemoved(block_hashes=(0xC06E38312D124D49,)),
            EngineStored(
                block_hashes=(0x29620535F92524AB,),
                parent_block_hash=0xA031BB7DD90E90D1,
                token_ids=(0x5C08, 0xAB92) * 16,
                block_size=32,
            ),
        ),
        time_s=1795216273.8991477,
    ),
}

# -------------------------------------------------------------------------------------------- written by hand
TS = "cb3ff8000000000000"  # 1.5
STORED = "ab426c6f636b53746f726564"  # "BlockStored"
REMOVED = "ac426c6f636b52656d6f766564"  # "BlockRemoved"
TYPE = "a474797065"
HASHES = "ac626c6f636b5f686173686573"  # "block_hashes"
PARENT = "b1706172656e745f626c6f636b5f68617368"  # "parent_block_hash"
TOKENS = "a9746f6b656e5f696473"  # "token_ids"
SIZE = "aa626c6f636b5f73697a65"  # "block_size"
LORA_ID = "a76c6f72615f6964"
MEDIUM = "a66d656469756d"
LORA = "a96c6f72615f6e616d65"  # "lora_name"
KEYS = "aa65787472615f6b657973"  # "extra_keys"
GROUP = "a967726f75705f696478"  # "group_idx"
KIND = "b26b765f63616368655f737065635f6b696e64"  # "kv_cache_spec_kind"
WINDOW = "bc6b765f63616368655f737065635f736c6964696e675f77696e646f77"  # "kv_cache_spec_sliding_window"
LOCALITY = "a86c6f63616c697479"
MM_KEYS = "a76d6d5f6b657973"
SALT = "aa63616368655f73616c74"  # "cache_salt"
GPU, CPU, CPU_PINNED = "a3475055", "a3435055", "aa4350555f50494e4e4544"
LOCAL, REMOTE = "a54c4f43414c", "a652454d4f5445"
FULL, SLIDING = "ae66756c6c5f617474656e74696f6e", "ae736c6964696e675f77696e646f77"  # "full_attention", "sliding_window"
TENANT = "a874656e616e742d61"  # "tenant-a"
TAGGED_TENANT = "ba64796e616d6f2d63616368652d73616c743a74656e616e742d61"  # "dynamo-cache-salt:tenant-a"

DIGEST_BYTES = "ffeeddccbbaa99887766554433221100f0e1d2c3b4a5968778695a4b3c2d1e0f"
DIGEST_TEXT = "30313233343536373839616263646566" * 4  # "0123456789abcdef" four times

BY_HAND = {
    "3.4 vLLM at first: arrays in a 2-array": Golden(
        f"92 {TS} 92"  # [1.5, [
        f"97 {STORED} 920708 05 98 0102030405060708 04 c0 {GPU}"  # hashes, parent, tokens, size, lora_id, medium
        f"93 {REMOVED} 9109 {GPU}",  # removed, hashes, medium]]
        None,
        (
            EngineStored(block_hashes=(7, 8), parent_block_hash=5, token_ids=EIGHT, block_size=4),
            EngineRemoved(block_hashes=(9,)),
        ),
    ),
    "3.4 SGLang at first: arrays that end at lora_id, in a 2-array": Golden(
        f"92 {TS} 92"
        f"96 {STORED} 91 d3fffffffffffffffb 06 9401020304 04 c0"  # hash -5 as i64, parent 6
        f"92 {REMOVED} 91 d3fffffffffffffffb",
        None,
        (
            EngineStored(block_hashes=(U64 - 5,), parent_block_hash=6, token_ids=FOUR, block_size=4),
            EngineRemoved(block_hashes=(U64 - 5,)),
        ),
    ),
    "3.4 SGLang newer: maps, a block goes to pinned host memory": Golden(
        f"93 {TS} 92"
        f"87 {TYPE}{STORED} {HASHES} 9107 {PARENT}c0 {TOKENS} 9401020304 {SIZE} 04 {LORA_ID}c0 {MEDIUM}{CPU_PINNED}"
        f"83 {TYPE}{REMOVED} {HASHES} 9107 {MEDIUM}{GPU}"
        "01",
        1,
        (
            EngineStored(block_hashes=(7,), parent_block_hash=None, token_ids=FOUR, block_size=4, tier=Tier.HOST),
            EngineRemoved(block_hashes=(7,)),
        ),
    ),
    "3.2 SGLang bigrams in an array": Golden(
        f"93 {TS} 91 97 {STORED} 910b c0 94 920102 920203 920304 920405 04 c0 {GPU} c0",
        None,
        (
            EngineStored(
                block_hashes=(11,), parent_block_hash=None, token_ids=(1, 2, 3, 4, 5), block_size=4, is_eagle=True
            ),
        ),
    ),
    "3.2 SGLang salt: a metadata object in the slot of lora_name": Golden(
        f"93 {TS} 91 98 {STORED} 9107 c0 9401020304 04 c0 {GPU} 81{SALT}{TENANT} 00",
        0,
        (EngineStored(block_hashes=(7,), parent_block_hash=None, token_ids=FOUR, block_size=4, namespace=OF_TENANT),),
    ),
    "3.2, 3.3 SGLang newest: fixed tail, a tagged salt, a metadata object behind": Golden(
        f"93 {TS} 93"
        f"9f {STORED} 9107 c0 9401020304 04 c0 {GPU} c0 91 91 {TAGGED_TENANT} c0c0c0c0c0 81{SALT}{TENANT}"
        f"98 {REMOVED} 9107 c0 c0c0c0c0c0"
        "92 b0416c6c426c6f636b73436c6561726564 c0"  # cleared, with a slot for a source kind
        "00",
        0,
        (
            EngineStored(block_hashes=(7,), parent_block_hash=None, token_ids=FOUR, block_size=4, namespace=OF_TENANT),
            EngineRemoved(block_hashes=(7,)),
            EngineCleared(),
        ),
    ),
    "1.3, 3.4 TensorRT-LLM streaming: all keys, multimodal": Golden(
        f"93 {TS} 91 8e {TYPE}{STORED} {HASHES} 920708 {PARENT}c0 {TOKENS} 98 0102030405060708 {SIZE} 04"
        f"{LORA_ID}c0 {MEDIUM}{GPU} {LORA}c0 {KEYS}c0 {GROUP} 00 {KIND}{FULL} {WINDOW}c0 {LOCALITY}{LOCAL}"
        f"{MM_KEYS} 92 c0 91"  # block 0 is text; block 1 has an item:
        f"83 {TYPE} a66d6d5f6b6579 a468617368 d940{DIGEST_TEXT} ac73746172745f6f6666736574 00"  # hash, start_offset
        "03",
        3,
        (
            EngineStored(
                block_hashes=(7, 8),
                parent_block_hash=None,
                token_ids=EIGHT,
                block_size=4,
                mm_hashes=((), (0x0123456789ABCDEF,)),
            ),
        ),
    ),
    "3.2 vLLM with hashes in bytes": Golden(
        f"93 {TS} 92"
        f"88 {TYPE}{STORED} {HASHES} 91 c420{DIGEST_BYTES} {PARENT} c408{'00' * 7}2a {TOKENS} 9401020304 {SIZE} 04"
        f"{LORA_ID}c0 {MEDIUM}{GPU} {LORA}c0"
        f"83 {TYPE}{REMOVED} {HASHES} 91 c420{DIGEST_BYTES} {MEDIUM}{GPU}"
        "c0",
        None,
        (
            EngineStored(block_hashes=(0x78695A4B3C2D1E0F,), parent_block_hash=42, token_ids=FOUR, block_size=4),
            EngineRemoved(block_hashes=(0x78695A4B3C2D1E0F,)),
        ),
    ),
    "3.3 vLLM's offloading: names only": Golden(
        f"93 {TS} 91 89 {TYPE}{STORED} {HASHES} 91 c420{DIGEST_BYTES} {PARENT}c0 {TOKENS} 90 {SIZE} 00"
        f"{LORA_ID}c0 {MEDIUM}{CPU} {LORA}c0 {GROUP} 00"
        "00",
        0,
        (
            EngineStored(
                block_hashes=(0x78695A4B3C2D1E0F,),
                parent_block_hash=None,
                token_ids=(),
                block_size=0,
                tier=Tier.HOST,
            ),
        ),
    ),
    "3.2 fixed tail: group, kind, window, locality": Golden(
        f"93 {TS} 94"
        f"9d {STORED} 9107 c0 9401020304 04 c0 {GPU} c0 c0 03 {FULL} c0 {LOCAL}"
        f"97 {REMOVED} 9107 {GPU} 03 c0 c0 {LOCAL}"
        f"9d {STORED} 9107 c0 9401020304 04 c0 {GPU} c0 c0 03 {FULL} c0 {REMOTE}"  # elsewhere
        f"9d {STORED} 9107 c0 9401020304 04 c0 {GPU} c0 c0 04 {SLIDING} 20 {LOCAL}"  # window of 32
        "00",
        0,
        (
            EngineStored(block_hashes=(7,), parent_block_hash=None, token_ids=FOUR, block_size=4, group_idx=3),
            EngineRemoved(block_hashes=(7,), group_idx=3),
        ),
        ignored=2,
    ),
    "3.2 legacy tail: items, group, kind": Golden(
        f"93 {TS} 94"
        f"9c {STORED} 9107 c0 9401020304 04 c0 c0 c0 c0"
        "91 81 aa6d6d5f6f626a65637473 91 82 a76d6d5f68617368 05 a76f666673657473 90"  # [{mm_objects: [{mm_hash: 5}]}]
        f"03 {FULL}"
        f"94 {REMOVED} 9107 c0 03"
        f"9c {STORED} 9107 c0 9401020304 04 c0 c0 c0 c0 04 {SLIDING} 20"
        f"94 {REMOVED} 9107 c0 04"
        "00",
        0,
        (
            EngineStored(
                block_hashes=(7,),
                parent_block_hash=None,
                token_ids=FOUR,
                block_size=4,
                mm_hashes=((5,),),
                group_idx=3,
            ),
            EngineRemoved(block_hashes=(7,), group_idx=3),
        ),
        ignored=2,
    ),
}

GOLDEN = FIXTURES | CAPTURED | BY_HAND
