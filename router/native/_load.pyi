from typing_extensions import Buffer

class LoadTable:
    def __init__(self) -> None: ...
    def add(self, row: int, chain: bytes) -> int: ...
    def remove(self, end: int) -> None: ...
    def blocks(self, row: int) -> int: ...
    def put(self, row: int, queued_tokens: int, requests: int, extra_blocks: int) -> None: ...
    def set_epoch(self, row: int, epoch: int) -> None: ...
    def columns(self, rows: bytes, chain: bytes) -> bytes: ...
    def expected(self, rows: bytes, chain: bytes, epochs: tuple[int, ...]) -> bytes | None: ...
    def node_count(self) -> int: ...
    def is_empty(self) -> bool: ...

class ReferenceEngine:
    def __init__(self, token: float, pair: float, step: float, sequence: float, kv_token: float, /) -> None: ...
    def terms(
        self,
        queued_tokens: Buffer,
        active_requests: Buffer,
        active_blocks: Buffer,
        shared_blocks: Buffer,
        credit: Buffer,
        prefill: Buffer,
        decode: Buffer,
        tokens: float,
        block_size: float,
        own_blocks: float,
        output_tokens: float,
        lateness_ms: float,
        ttft_weight: float,
        is_prefilled: bool,
        is_decoded: bool,
        /,
    ) -> bytes: ...

class FactorRules:
    def __init__(self, forget_s: float, alike: float, halvings_max: int, /) -> None: ...
    def used(
        self,
        prefill: Buffer,
        decode: Buffer,
        prefill_belief: Buffer,
        decode_belief: Buffer,
        measured_s: Buffer,
        prefill_shared: float,
        prefill_mean: float,
        decode_shared: float,
        decode_mean: float,
        now_s: float,
        /,
    ) -> bytes: ...
