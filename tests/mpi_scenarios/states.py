"""The states that collectives keep from call to call: damaged states are refused whole."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_compress.errors import ConfigError
from hvd_compress.mpi.tuning.cost_model import CostModel
from tests.mpi_scenarios.common import world
from tests.mutations import mutations


def _problem_of(load: Callable[[Any], Any], state: Any) -> str:
    try:
        load(state)
    except ConfigError as error:
        return str(error)
    return ""


def cost_models() -> None:
    points = {"direct": ((8, 1e-5), (1024, 2e-5)), "ring": ((8, 1e-4), (1024, 1e-4))}
    sparse = {"allgather": ((16, 1e-4), (256, 2e-4))}
    model = CostModel(world.size, points, sparse)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        model.save(path)
        assert CostModel.load(path) == model
        text, refused = path.read_text(), 0
        for _, damaged in mutations(json.loads(text), 200):
            path.write_text(json.dumps(damaged, default=str))
            loaded: list[CostModel] = []
            if _problem_of(lambda p, found=loaded: found.append(CostModel.load(p)), path):
                refused += 1
                continue
            (found,) = loaded
            assert all(found.seconds(name, 100) >= 0 for name in found.points)
            assert all(found.sparse_seconds(name, 100) >= 0 for name in found.sparse_points)
        assert refused > 100
        for cut in (0, 1, len(text) // 2):
            path.write_text(text[:cut])
            assert "cost model" in _problem_of(CostModel.load, path)
