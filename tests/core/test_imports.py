"""The core loads no framework: a module that did would make ``import hvd_compress`` slow, and
impossible where the framework is missing."""

import ast
import functools
import graphlib
import json
import pkgutil
import re
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
        "hvd_compress.codecs.top_k",
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


#: our packages, and the folders that they lie in
PACKAGES = {"hvd_compress": "", "hvd_compress.torch": "torch_impl", "hvd_compress.tensorflow": "tf"}


@functools.cache
def imports() -> dict[Path, dict[Path, int]]:
    """The files of ours that each file of ours imports, at the top or in functions, and in which
    line."""
    names = {}
    for package, folder in PACKAGES.items():
        for file in (ROOT / (folder or package)).rglob("*.py"):
            parts = file.relative_to(ROOT / (folder or package)).with_suffix("").parts
            names[".".join([package, *(part for part in parts if part != "__init__")])] = file
    found: dict[Path, dict[Path, int]] = {}
    for name, file in names.items():
        found[file] = {}
        parts = f"{name}.__init__" if file.stem == "__init__" else name
        for node in ast.walk(ast.parse(file.read_text())):
            wanted = []
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = parts.split(".")[: -node.level] if node.level else []
                base = ".".join([*above, *filter(None, [node.module])])
                wanted = [f"{base}.{alias.name}" for alias in node.names]
                wanted = [whole if whole in names else base for whole in wanted]
            for target in (names[whole] for whole in wanted if whole in names):
                found[file].setdefault(target, node.lineno)
        found[file].pop(file, None)
    return found


def room_of(file: Path) -> str:
    """A file's folder, as docs/design.md names it; of the files at the core's top, itself."""
    path = file.relative_to(ROOT).as_posix().removeprefix("hvd_compress/")
    folder = path.rpartition("/")[0]
    return f"{folder}/" if folder else path


def rooms_in_order() -> list[str]:
    """The table of docs/design.md, which is the rule: a room imports only those before it."""
    table = (ROOT / "docs/design.md").read_text().partition("\n## Decisions")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    return [room for cell in cells for room in re.findall(r"`([^`]+)`", cell)]


def test_the_command_that_builds_horovod_imports_nothing_of_ours():
    found = {
        room_of(to)
        for file, targets in imports().items()
        for to in targets
        if room_of(file) == "horovod_wheel/"
    }
    assert found <= {"horovod_wheel/"}


#: rooms that import one behind them, and why they still do
EXCEPTIONS = {
    ("torch_impl/", "torch_impl/ddp/"): "hooks for trainers stand at the door",
}


def test_a_room_imports_only_those_before_it_in_the_design():
    order, found = rooms_in_order(), {}
    existing = {room_of(file) for file in imports()}
    assert sorted(order) == sorted(existing), "the table of docs/design.md has other rooms"
    for file, targets in imports().items():
        for target, line in targets.items():
            pair = room_of(file), room_of(target)
            exports = file.name == "__init__.py" and target.is_relative_to(file.parent)
            if order.index(pair[1]) > order.index(pair[0]) and not exports:
                found[pair] = (
                    f"{file.relative_to(ROOT)}:{line} imports {target.relative_to(ROOT)}, but in "
                    f"the table of docs/design.md `{pair[1]}` comes after `{pair[0]}`"
                )
    assert not [text for pair, text in found.items() if pair not in EXCEPTIONS]
    assert EXCEPTIONS.keys() <= found.keys(), "this is mended, and no exception any more"


def circle(graph):
    """Modules that import each other, if there are such."""
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_module_imports_one_that_imports_it():
    torch, graph = ROOT / "torch_impl", imports()
    assert torch / "amp.py" in graph[torch / "optimizers/binding.py"]
    assert torch / "optimizers/compressed_optimizer.py" in graph[torch / "mpi/optimizer.py"]
    assert circle(graph) is None


def test_a_circle_would_be_noticed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


ASKED_AT_ONCE = """
import pickle, sys, threading
import hvd_compress, hvd_compress.tensorflow.keras, hvd_compress.torch as hvd
assert not [name for name in sys.modules if name.startswith("hvd_compress.systems")]
barrier, found = threading.Barrier(4), []
def ask():
    barrier.wait()
    found.append((hvd.Codistillation, hvd.LocalSGD))
threads = [threading.Thread(target=ask) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 4 and len(set(found)) == 1, found
assert pickle.loads(pickle.dumps(found[0])) == found[0]
"""


def test_systems_wait_until_they_are_asked_for():
    """And threads that ask at once get the same."""
    assert "hvd_compress.systems.rounds" in loaded_by(ASKED_AT_ONCE)


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
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
sgd = torch.optim.SGD(model.parameters(), 0.1)
without = hvd_compress.torch.DistributedOptimizer
try:
    without(sgd, method=hvd_compress.torch.LocalSGD(2), process_set=dist.group.WORLD)
except hvd_compress.ConfigError as error:
    assert "there is one replica only" in str(error)
else:
    raise AssertionError
for needs in (
    lambda: hvd_compress.torch.allreduce,
    lambda: without(sgd, compression="topk"),
    lambda: without(sgd, method=hvd_compress.torch.LocalSGD(2)),
):
    try:
        needs()
    except hvd_compress.SetupError as error:
        assert "hvd-compress-horovod" in str(error)
    else:
        raise AssertionError
"""


def test_training_over_mpi_needs_no_horovod():
    assert "horovod.torch" not in loaded_by(WITHOUT_HOROVOD)
