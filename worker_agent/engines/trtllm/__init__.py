"""TensorRT-LLM in this process. `bindings` alone imports it, `tensors` alone imports torch and Pillow."""
