"""``python -m hvd_compress`` is ``hvd-compress``."""

import sys

from hvd_compress.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
