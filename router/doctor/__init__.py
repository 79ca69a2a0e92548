"""A look at a running fleet, from outside: its log, its routers, its workers; and pure checks of what was seen."""
