"""``OMP_NUM_THREADS=1 python -m hvd_compress.advisor [MODEL ...]`` measures the kept pieces anew;
all models take a quarter of an hour."""

import sys

from hvd_compress.advisor.advice import CANDIDATES
from hvd_compress.advisor.pieces import keep

if __name__ == "__main__":
    keep([candidate.method for candidate in CANDIDATES], sys.argv[1:])
