"""Sums of vectors that are given by indices and values."""
