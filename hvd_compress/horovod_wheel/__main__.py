"""``python -m hvd_compress.horovod_wheel`` is the command ``hvd-compress-horovod``."""

from hvd_compress.horovod_wheel.build import main

if __name__ == "__main__":
    raise SystemExit(main())
