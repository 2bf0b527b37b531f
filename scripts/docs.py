"""Build the site of the documentation into ``site/``: what ``make docs`` runs."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: a folder of its own: see scripts/setup.py
ZENSICAL = ROOT / ".venv" / "docs"


def build(project: Path) -> "subprocess.CompletedProcess[str]":
    """Build the site of a folder with ``zensical.toml`` and ``docs/``; warnings are errors."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    found = {**os.environ, "PYTHONPATH": str(ZENSICAL), "NO_COLOR": "1"}
    return subprocess.run(command, cwd=project, env=found, capture_output=True, text=True)


def main() -> None:
    if not (ZENSICAL / "zensical").is_dir():
        sys.exit("docs: error: Zensical is not there; it needs Python 3.11: make setup PYTHON=...")
    subprocess.run([sys.executable, ROOT / "scripts" / "api.py"], cwd=ROOT, check=True)
    done = build(ROOT)
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}docs: error: the site has broken links or pages")
    print(f"docs: {ROOT / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()
