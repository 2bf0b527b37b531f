"""Files of the project that are written in TOML."""

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def toml(file: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / file).read_text())


PROJECT = toml("pyproject.toml")["project"]
