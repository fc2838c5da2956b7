"""Mismatch measured and put back. Nothing is imported here: what reads dumps needs no compiled engine."""
