"""TensorRT-LLM in this process. Only `bindings` imports it, only `tensors` and `logits` import torch."""
