"""Measures the real processes. Each module is one bench; `report` holds the conventions they share."""
