"""A router that may open 256 files: `python -m tests.system.e2e.few_files` in place of `python -m router`."""

import resource

from router.__main__ import main

ALLOWED = 256

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (ALLOWED, ALLOWED))
    main()
