"""A survey of a running fleet, from outside: its log, its routers, its workers; and pure checks of its facts."""
