"""The router's fold (`core.hpp`) and readers of HTTP (`http.hpp`) in C++, built together with `indexer/native`.

The router does not run without it: importing this module fails if the extension is missing, damaged, or built for
another machine or from sources with another interface.
"""

from kv_protocol.decided import TERMS

INTERFACE = (34, len(TERMS))
"""The version of the extension's interface (to change it, raise it here and in `module.cpp`); a cost's term count."""

try:
    from router.native import _fold as built
except ImportError as error:
    raise ImportError(f"the router's C++ extension is missing ({error})") from error
if getattr(built, "INTERFACE", 0) != INTERFACE:
    raise ImportError("the router's C++ extension is of another version")
