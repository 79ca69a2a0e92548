"""TensorRT-LLM in this process. `library` alone imports it, `tensors` alone imports torch and Pillow."""
