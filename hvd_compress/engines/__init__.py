"""Engines carry exchanges between ranks: in one process, or over a library of collectives."""
