"""Wire formats of engines, old and new, translated into engine events."""
