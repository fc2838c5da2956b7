"""The theorem, checked on one checkpoint: what is compared, what must differ, and mutants that must be caught."""
