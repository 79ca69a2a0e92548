"""Pools of routers: which one is asked, by a grid of targets, and which others, by what is known of them now."""
