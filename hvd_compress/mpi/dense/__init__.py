"""Collectives of arrays that are sent whole."""
