"""Comparing two sets of records: what became faster, slower, wrong, or cannot be told."""
