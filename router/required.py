"""Imported before anything that needs the extra `router` or the C++ extension: without them the process ends with one
sentence."""  # noqa: D205, D209

from kv_runtime.extras import require, require_built

require("router", "router", "the router")
require_built("router", "router.native")
