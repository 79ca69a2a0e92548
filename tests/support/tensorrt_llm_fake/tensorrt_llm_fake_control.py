"""The one name by which a test reaches the fake's control object: `tensorrt_llm_fake_control.control`.

It stands beside the package, not in it: nothing of it exists in the real one, so an engine that imports it is wrong.
"""

from importlib import import_module

control = import_module("tensorrt_llm._fake.control").control
