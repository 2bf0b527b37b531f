"""Tests; what several of them share is imported as ``from tests import jobs``."""
