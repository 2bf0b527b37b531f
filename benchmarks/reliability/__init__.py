"""Campaigns of reliability: what is done to frames, jobs and memory, how often, and what comes of
it.  ``python -m benchmarks.reliability --help`` lists them; docs/reliability.md has the results.
"""
