"""The wires of engines, old and new. Foreign spellings end here."""
