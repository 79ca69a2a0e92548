"""The commands of `router` that look at what routers have written."""
