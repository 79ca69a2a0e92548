"""Scheduling rules that differ between engines.

plans_ahead     the batch of an iteration is fixed when the iteration before it begins, so that the host plans while
                the GPU computes; a request that comes meanwhile waits for the end of both. Otherwise: it is fixed
                when the iteration itself begins.
shares_at_once  a prompt's blocks can be reused as soon as their computation is scheduled, even by the next request
                of the same batch. Otherwise: when the prompt's whole context is computed.
"""

import msgspec


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of each."""

    plans_ahead: bool = False
    shares_at_once: bool = False


TRTLLM = Scheduling()
"""TensorRT-LLM without its overlap scheduler."""
VLLM = Scheduling(plans_ahead=True, shares_at_once=True)
"""Source: vLLM's release notes of 0.14 (asynchronous scheduling by default), its prefix caching design document."""
