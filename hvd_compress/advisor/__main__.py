"""``OMP_NUM_THREADS=1 python -m hvd_compress.advisor`` measures the kept pieces anew, in some
minutes."""

from __future__ import annotations

import argparse

from hvd_compress.advisor.advice import CANDIDATES
from hvd_compress.advisor.pieces import KEPT, keep
from hvd_compress.advisor.shapes import MODELS

if __name__ == "__main__":
    methods = [candidate.method for candidate in CANDIDATES]
    parser = argparse.ArgumentParser(description="Measure what methods cost on one core.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=KEPT)
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    options = parser.parse_args()
    keep(options.methods, options.models)
