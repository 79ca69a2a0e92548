"""Engines that this router attaches itself (`router --worker`): their addresses, lists of them, and their life."""
