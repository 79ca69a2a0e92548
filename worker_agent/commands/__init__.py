"""The commands of `worker-agent`: each puts its process together."""
