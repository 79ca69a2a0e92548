"""Wire formats of engines, old and new. Foreign spellings end here."""
