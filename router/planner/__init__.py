"""Inputs for an autoscaler: the offered load, what a worker can do, and how many workers keep the objectives."""
