# ruff: noqa: N999  the real name
"""As much of Pillow as the agent uses: it comes with TensorRT-LLM. Source: Pillow's reference, module Image."""
