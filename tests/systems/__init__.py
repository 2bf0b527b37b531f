"""Tests of training with local steps."""
