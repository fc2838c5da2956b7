"""Real causes of mismatch as switches: a side that computes the same policy in another order, precision or state."""
