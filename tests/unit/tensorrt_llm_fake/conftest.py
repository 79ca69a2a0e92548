from tests.support.trtllm import trtllm

__all__ = ["trtllm"]
