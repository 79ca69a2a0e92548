"""Sends each request to the best worker rank, and can say why.

`core/` decides, pure. Around it: HTTP in and out, tokens, feeds of fleet, load and KV events, the command line.
"""
