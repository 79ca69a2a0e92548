"""A look at a running fleet, from outside: its log, its routers, its workers. What it means is `router/core/doctor`."""
