"""Measured and predicted costs of collectives."""
