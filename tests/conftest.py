"""Hypothesis draws the same examples in every run, and may take its time on a busy machine."""

import os

from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")

# Small arrays, many processes: threads that wait for each other cost ten times what they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Programs that are started by tests, with arguments.
collect_ignore = ["elastic_worker.py", "train_small.py"]
