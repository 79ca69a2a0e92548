"""Scheduling rules that differ between engines.

plans_ahead     the batch of an iteration is fixed when the iteration before it begins, so that the host plans while
                the GPU computes; a request that comes meanwhile waits for the end of both. Otherwise: it is fixed
                when the iteration itself begins.
shares_at_once  a prompt's blocks can be reused as soon as their computation is scheduled, even by the next request
                of the same batch. Otherwise: when the prompt's whole context is computed.
preempts        a request is admitted when the blocks of its prompt are available, and takes one more whenever its
                answer needs it. Where none is left, the request admitted last is preempted: it frees its blocks, goes
                to the front of the queue, and later computes prompt and answer anew, except what is still cached.
                Otherwise: the blocks of the longest answer are reserved at admission.
"""

import msgspec


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of each."""

    plans_ahead: bool = False
    shares_at_once: bool = False
    preempts: bool = False


TRTLLM = Scheduling()
"""TensorRT-LLM without its overlap scheduler."""
VLLM = Scheduling(plans_ahead=True, shares_at_once=True, preempts=True)
"""Source: vLLM's release notes of 0.14 (asynchronous scheduling by default), its prefix caching design document.

Preemption: vLLM 0.24.0, `vllm/v1/core/sched/scheduler.py`, `schedule` (running requests before waiting ones; the last
of the running is preempted; no admission in a step that preempted) and `_preempt_request` (no computed tokens, front of
the queue); admission: `vllm/config/scheduler.py`, `scheduler_reserve_full_isl` (true) and `watermark` (0).
"""
