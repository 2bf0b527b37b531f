"""Decentralised methods."""
