"""The core loads no framework: a module that did would make ``import hvd_compress`` slow, and
impossible where the framework is missing."""

import ast
import graphlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hvd_compress

ROOT = Path(hvd_compress.__file__).parent.parent
HEAVY = {"torch", "tensorflow", "keras", "horovod", "mpi4py", "numba", "jax", "scipy"}
#: packages that may load what their name says
OPTIONAL = (
    "hvd_compress.torch",
    "hvd_compress.tensorflow",
    "hvd_compress.kernels",
)


def modules():
    found = [
        module.name
        for module in pkgutil.walk_packages(
            hvd_compress.__path__, "hvd_compress.", onerror=lambda name: None
        )
    ]
    core = [n for n in found if not n.startswith(OPTIONAL) and "mpi" not in n.split(".")]
    return ["hvd_compress", *core]


def loaded_by(code):
    code += "\nimport json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_core_is_found():
    assert {
        "hvd_compress.base",
        "hvd_compress.engines.lockstep",
        "hvd_compress.methods.dgc",
        "hvd_compress.operators.top_k",
        "hvd_compress.testing",
        "hvd_compress.wire.frame",
    } <= set(modules())


def test_nothing_heavy_with_the_package():
    loaded = loaded_by("import hvd_compress")
    assert "numpy" in loaded
    assert not HEAVY & set(loaded)


def test_nothing_heavy_with_any_module_of_the_core():
    """All in one process first; one by one only to name the culprit."""
    names = [name for name in modules() if not name.endswith("__main__")]
    if HEAVY & set(loaded_by("import " + ", ".join(names))):
        culprits = {name: sorted(HEAVY & set(loaded_by(f"import {name}"))) for name in names}
        pytest.fail(f"these load too much: { {k: v for k, v in culprits.items() if v} }")


def test_this_test_would_notice():
    assert "mpi4py" in loaded_by("import hvd_compress, mpi4py")
    assert HEAVY & set(loaded_by("import hvd_compress.backends.base, torch")) == {"torch"}


def imports_of_siblings(folder):
    """The modules of a package that each of its modules imports, at the top or in functions."""
    files = {file.relative_to(folder).with_suffix("").parts: file for file in folder.rglob("*.py")}
    names = {parts: ".".join(part for part in parts if part != "__init__") for parts in files}
    found = {}
    for parts, file in files.items():
        found[names[parts]] = targets = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = [*parts[: len(parts) - node.level], *filter(None, [node.module])]
            for alias in node.names:
                whole = ".".join([*base, alias.name])
                targets.add(whole if whole in names.values() else ".".join(base))
        targets -= {"", names[parts]}
    return found


def circle(graph):
    """Modules that import each other, if there are such."""
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_module_for_pytorch_imports_one_that_imports_it():
    graph = imports_of_siblings(ROOT / "torch_impl")
    assert "amp" in graph["binding"]
    assert "compressed_optimizer" in graph["mpi.optimizer"]
    assert circle(graph) is None


def test_a_circle_would_be_noticed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


def test_numpy_work_loads_no_framework():
    loaded = loaded_by(
        "import numpy as np\n"
        "from hvd_compress import DGC\n"
        "from hvd_compress.engines.lockstep import World\n"
        "World(DGC(min_size=0), 2).exchange([np.ones((4, 5)), np.ones((4, 5))])"
    )
    assert not HEAVY & set(loaded)


WITHOUT_HOROVOD = """
import sys
sys.modules["horovod"] = None  # as if it was not installed
import torch
import hvd_compress.torch
import hvd_compress.torch.mpi as hvd
hvd.init()
model = torch.nn.Linear(30, 5)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=hvd.DGC(density=0.1),
)
for _ in range(2):
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
try:
    hvd_compress.torch.allreduce
except hvd_compress.SetupError as error:
    assert "install-horovod" in str(error)
else:
    raise AssertionError
"""


def test_training_over_mpi_needs_no_horovod():
    assert "horovod.torch" not in loaded_by(WITHOUT_HOROVOD)
