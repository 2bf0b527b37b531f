"""The programs and commands of the documentation run."""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import masking, steps_report
from hvd_compress import DGC, as_compressor, config, method_names
from hvd_compress.advisor.costs import costs, costs_of_defaults
from hvd_compress.engines.local import LocalEngine
from hvd_compress.reduce import Reducer
from hvd_compress.studies.step_sizes import kept_by_top_k
from hvd_compress.testing import check_laws
from mpi_examples.study import spread
from tests import jobs

ROOT = Path(__file__).resolve().parents[2]


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_method_from_scratch_obeys_the_laws(monkeypatch):
    import tensorflow as tf
    import torch

    registered = dict(config._REGISTRY["method"])
    monkeypatch.setitem(config._REGISTRY, "method", registered)  # gone again after the test
    first, *blocks, method, laws, in_four_places = snippets("docs/extending.md")
    scope: dict[str, object] = {"__name__": "a_users_module"}
    exec(first.split("optimizer =")[0], scope)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, scope)
    exec(method, scope)
    exec(laws, scope)
    exec(compile(in_four_places, "extending.md", "exec", dont_inherit=True), scope)
    assert in_four_places.count("\n") < 45
    check_laws(as_compressor("sign_topk:density=0.05"), make=np.asarray, namespace=scope)
    made = as_compressor("scaled-sign")
    assert made == scope["ScaledSign"]()
    for make in (torch.from_numpy, tf.convert_to_tensor):
        usual = {"sizes": (1, 3), "dtypes": ("float16", "float32"), "shapes": ((7,), (33, 40))}
        check_laws(made, make=make, namespace=scope, **usual)


@functools.cache
def measured(name: str) -> Any:
    """The record that a benchmark has written."""
    return json.loads((ROOT / f"benchmarks/{name}.json").read_text())


def error_of(method: str) -> str:
    """The error of the mean over four models; of those that average something else, none."""
    if config.lookup("method", method).partner:
        return "-"
    mean = np.mean([*measured("codec_errors")[method]["errors"].values()])
    return f"{mean:.2g}" if mean < 1 else "> 1"


def test_tables_are_what_was_measured():
    rows = steps_report.read(ROOT / "benchmarks/steps.json")
    for name in ("performance", "performance-internals"):
        page = (ROOT / f"docs/{name}.md").read_text()
        assert steps_report.in_page(page, rows) == page, "python benchmarks/steps.py --load --pages"
    page = (ROOT / "docs/methods/linear.md").read_text()
    for method, row in measured("codec_errors").items():
        if method.startswith(("fp8", "linear")):
            errors = " | ".join(f"{error:.2e}" for error in row["errors"].values())
            assert f"| {row['bits']:.2f} | {errors} |" in page, method


def test_times_in_the_text_are_those_of_the_table():
    page = (ROOT / "docs/performance.md").read_text()
    text = page.partition("<!-- end -->")[2].partition("\n###")[0]
    rows = steps_report.read(ROOT / "benchmarks/steps.json")
    medians = {f"{1000 * row.median:,.0f}" for row in rows}
    found = re.findall(r"([\d,]+) ms(?! of backward)", text)
    assert len(found) >= 9
    assert set(found) <= medians


def test_a_hook_takes_as_much_longer_as_the_page_says():
    inner = (ROOT / "docs/performance-internals.md").read_text()
    table = inner.partition("### Hooks and optimizers")[2]
    rows = re.findall(r"^\| `\w+\(.*\)` \| (\d+) \| \d+ \| (\d+) \|", table, re.MULTILINE)
    low, _, high = sorted(int(views) / int(optimizer) for optimizer, views in rows)
    assert f"[{low:.1f} to {high:.1f} times]" in (ROOT / "docs/performance.md").read_text()


def test_memory_in_the_page_is_what_was_measured():
    page = (ROOT / "docs/performance.md").read_text().partition("\n## Memory")[2]
    rows = re.findall(r"^\| `?([\w ]+)`? \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) > 5
    for name, *figures in rows:
        assert figures == [f"{figure:.1f}" for figure in measured("memory")[name].values()], name


def test_shares_that_top_k_keeps_are_those_of_the_formulas():
    text = " ".join((ROOT / "docs/biased-compression.md").read_text().split())
    uniform, normal, exponential = (
        f"{kept_by_top_k(0.01, inputs):.3f}" for inputs in ("uniform", "normal", "exponential")
    )
    assert f"It keeps {uniform} of uniform inputs, {normal} of normal and {exponential} of" in text


def test_the_table_of_dgc_is_of_its_runs():
    table = masking.overview(measured("masking"))
    assert table in (ROOT / "docs/methods/dgc.md").read_text(), "benchmarks.masking --overview"


def test_the_table_of_local_steps_is_of_its_runs():
    page = (ROOT / "docs/training/local-sgd.md").read_text()
    known = measured("rounds")
    for steps in (8, 15, 30, 50):
        entries = []
        for task, method in itertools.product(("digits", "lstm"), ("sparse_loco", "diloco")):
            head = f"{task} {method}:sync_every={steps} "
            runs = [run for key, run in known.items() if key.startswith(head)]
            assert len(runs) == 5
            entries.append(spread([run["final"] for run in runs]).replace("+-", "±"))
            sent = statistics.mean(run["sent"] for run in runs)
            entries.append(f"{sent / 1024:.2g} KiB" if sent < 10240 else f"{sent / 1024:.0f} KiB")
        assert f"| {steps} | {' | '.join(entries)} |" in page
    for task in ("digits", "lstm"):
        dense = [run["final"] for key, run in known.items() if key.startswith(f"{task} none ")]
        assert spread(dense).replace("+-", "±") in page


def test_a_rows_floor_is_that_of_its_bytes_and_of_a_stream():
    """By hand: 4 ranks, 1 MB of gradient, 1 MB/s to each rank."""
    cell = "4x8mbit", "torch", "of one tensor", 0.0

    def row(name: str, seconds: float, sent: float | None, received: float | None):
        return steps_report.Row(*cell, name, [seconds] * 3, 0.0, sent, received, 1e6, 1e6, 4)

    rows = [row("backward", 0.5, None, None), row("stream", 0.25, None, None)]
    rows += [row("Horovod fp32", 2.5, 1e6, 1e6), row("topk", 1.25, 1e5, 4e5)]
    own = steps_report.cells(rows)[cell]
    assert steps_report.beyond(own["Horovod fp32"], own) == (2.0, pytest.approx(1.5))
    assert steps_report.beyond(own["topk"], own) == (0.75, pytest.approx(0.4 + 0.25))
    assert "| topk | 1,250 |" in steps_report.medians(rows)
    once = [dataclasses.replace(row, seconds=row.seconds[:1]) for row in rows]
    assert "| topk | 1,250\\* |" in steps_report.medians(once)
    assert "| topk | 1.2 |" in steps_report.floors(rows)
    assert "| Gbit/s that arrive at each rank | 0.008 |" in steps_report.floors(rows)


def test_cells_that_were_measured_before_stay(tmp_path):
    def row(network: str, name: str):
        cell = network, "torch", "resnet50", 0.0
        return steps_report.Row(*cell, name, [1 / 3], 0.0, None, None, 4.0, None, 4)

    file = tmp_path / "steps.json"
    steps_report.kept([row("shm", "fp16"), row("shm", "topk"), row("4x1gbit", "fp16")], file)
    steps_report.kept([row("shm", "dgc")], file)
    kept = [(own.network, own.name) for own in steps_report.read(file)]
    assert kept == [("4x1gbit", "fp16"), ("shm", "dgc")]
    assert steps_report.read(file)[0].seconds == [0.333333]


@pytest.mark.parametrize("name", [n for n in method_names() if not n.startswith("test-")])
def test_every_method_has_its_row_and_page(name):
    method = as_compressor(name)
    page = (ROOT / "docs/methods.md").read_text()
    found = re.search(rf"^\| `{name}` \| `(\w+)` \|(.*)\[(\S+)\]\((\S+)\) \|$", page, re.MULTILINE)
    assert found, "the table of docs/methods.md lacks it"
    own = costs(method)
    expected = f"{own.sent:g} | {own.received:g} | {error_of(name)} |"
    expected += f" {measured('memory')[name]['resident']:.1f} |"
    assert (found[1], found[2].strip()) == (type(method).__name__, expected)
    assert type(method).__name__ in (ROOT / "docs" / found[4].partition("#")[0]).read_text()
    assert costs_of_defaults(name) == own, "to write it anew: python -m hvd_compress.advisor.costs"


PAGES_THAT_RUN = (
    "README.md",
    "docs/checkpoints.md",
    "docs/ddp.md",
    "docs/decentralized.md",
    "docs/first-run.md",
    "docs/fsdp.md",
    "docs/mpi.md",
    "docs/mpi-training.md",
    "docs/measures.md",
    "docs/methods/onebit-adam.md",
    "docs/sparse-collectives.md",
    "docs/tensorflow.md",
    "docs/training/codistillation.md",
    "docs/training/large-batch.md",
    "docs/training/leader-sgd.md",
    "docs/training/local-sgd.md",
    "docs/training/parameter-server.md",
)
#: runs the files it is given one after the other, each as a program of its own in a folder of its
#: own, since some write files
RUN_ALL = """
import os, runpy, sys
for file in list(sys.argv[1:]):
    sys.argv[:] = [file]
    os.chdir(os.path.dirname(file))
    runpy.run_path(file, run_name="__main__")
    sys.stdout.flush()
    os.write(1, f"ran {file}\\n".encode())  # in one piece, since launchers mix those of ranks
"""


def blocks_that_run(page: str) -> list[str]:
    blocks = snippets(page)
    return blocks[:1] if page == "README.md" else blocks


def group_of(block: str) -> str:
    """The command that starts a program of a page."""
    if "init_process_group" in block:
        return "torchrun"
    if not re.search(r"\b(hvd|mpi|MPI)\b", block):
        return "alone"
    return "keras" if re.search(r"^import keras", block, re.MULTILINE) else "mpi"


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """The files with each page's blocks, how often each should run, and what its job printed: one
    job for all of PyTorch and NumPy that MPI or Horovod starts, and one for Keras, since most time
    goes into imports; one for each under torchrun; and one process for what knows of no ranks."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "run_all.py").write_text(RUN_ALL)
    files: dict[str, list[str]] = {}
    groups: dict[str, list[str]] = {"mpi": [], "keras": [], "torchrun": [], "alone": []}
    for page in PAGES_THAT_RUN:
        for number, block in enumerate(blocks_that_run(page)):
            file = folder / page.replace("/", "-") / f"block-{number}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(block)
            files.setdefault(page, []).append(str(file))
            groups[group_of(block)].append(str(file))
    said = {}
    for launcher, each in (
        ([*jobs.launcher(2, "mpirun"), jobs.python()], groups["mpi"]),
        ([*jobs.launcher(2, "mpirun"), jobs.python("tensorflow")], groups["keras"]),
        # a process joins one group in its life
        *((jobs.torchrun(2), [file]) for file in groups["torchrun"]),
        ([jobs.python()], groups["alone"]),
    ):
        command = [*launcher, str(folder / "run_all.py"), *each]
        _, output = jobs.run(command, timeout=120 + 15 * len(each), check=False)
        said |= dict.fromkeys(each, output)
    ran = {file: 1 if file in groups["alone"] else 2 for each in files.values() for file in each}
    return files, ran, said


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("page", [pytest.param(page, id=f"@{page}") for page in PAGES_THAT_RUN])
def test_what_pages_show_runs_on_two_ranks(pages, page):
    files, ran, said = pages
    for file in files[page]:
        output = said[file]
        assert output.count(f"ran {file}") == ran[file], f"{file}, or before: {output[-5000:]}"


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
            if page.name != "README.md":
                inside = (page.parent / target).resolve().is_relative_to(ROOT / "docs")
                assert inside, f"{page.name}: {target} is not in the site; name it in backquotes"


def test_files_that_are_named_exist():
    """In docstrings and comments, by the end of their paths."""
    packages = ("hvd_compress", "torch_impl", "tf")
    sources = [file for part in packages for file in (ROOT / part).rglob("*.py")]
    named = {
        name: source
        for source in sources
        for name in re.findall(r"`([\w/-]+/[\w-]+\.(?:py|cpp|h|md))`", source.read_text())
    }
    folders = (*packages, "docs", "mpi_examples", "benchmarks", "tests")
    known = [f"/{file.relative_to(ROOT)}" for part in folders for file in (ROOT / part).rglob("*")]
    assert named
    for name, source in named.items():
        assert any(path.endswith(f"/{name}") for path in known), f"{source}: {name}"


def test_the_design_knows_all_that_knows_a_request():
    page = (ROOT / "docs/design.md").read_text()
    request = re.search(r"\*\*A new kind of request\*\*(.*?)\n\n", page, re.DOTALL)[1]
    kinds = [re.compile(rf"\b{kind}\b") for kind in ("Alltoall", "Neighbors", "Broadcast")]
    for folder, prefix in (("hvd_compress", ""), ("torch_impl", "torch_impl/"), ("tf", "tf/")):
        for file in (ROOT / folder).rglob("*.py"):
            if all(kind.search(file.read_text()) for kind in kinds):
                assert f"`{prefix}{file.relative_to(ROOT / folder)}`" in request


@pytest.mark.parametrize(
    ("page", "name"),
    [("decentralized.md", "ExactDiffusion"), ("training/parameter-server.md", "parameter_server")],
)
def test_pages_say_which_frameworks_they_serve(page, name):
    import hvd_compress.tensorflow.keras.mpi as of_keras
    import hvd_compress.torch.mpi as of_torch

    text = (ROOT / "docs" / page).read_text()
    first, _, rest = re.search(r"\*\*Frameworks:\*\*(.*?)\n\n", text, re.DOTALL)[1].partition(".")
    has_it = hasattr(of_torch, name), hasattr(of_keras, name)
    assert ("PyTorch" in first, "Keras" in first) == has_it
    assert ("for Keras" in rest) == (not hasattr(of_keras, name))


def sent_for_resnet50(method):
    """The bytes of a rank in a step, counted from its messages."""
    from hvd_compress.advisor.shapes import resnet50

    random = np.random.default_rng(0)
    reducer = Reducer(method, LocalEngine(), momentum=0.9 * method.takes_momentum, in_place=True)
    reducer.reduce({k: random.standard_normal(s, np.float32) for k, s in resnet50().items()})
    total = reducer.stats().total
    return total.bytes_sent, total.ratio


def test_figures_of_the_readme_are_what_was_measured(tmp_path):
    rows = steps_report.cells(steps_report.read(ROOT / "benchmarks/steps.json"))
    own = rows["4x1gbit", "torch", "resnet50", 100.0]
    text = " ".join((ROOT / "README.md").read_text().split())
    for name in steps_report.BARS:
        row, milliseconds = own[name], f"{1000 * own[name].median:.0f} ms"
        ratio = f"{row.dense / row.sent:.0f}x"
        said = milliseconds if name.startswith("DDP") else f"| {ratio} | {milliseconds} |"
        assert said in text, name
    accuracy = steps_report.accuracy_on_mnist()
    assert f"dense training has {accuracy['none']:.2f} %" in text
    assert "hook was not trained: it has the percentage of our `fp16`" in text
    said = "; ".join(steps_report.said_of_bars(own, accuracy))
    again = tmp_path / "bars.png"
    command = ["benchmarks/steps.py", "--load", "benchmarks/steps.json", "--bars", str(again)]
    jobs.run([sys.executable, *command, "--networks", "4x1gbit", "--backward", "100"], timeout=120)
    for picture in (ROOT / "docs/step-1gbit.png", again):
        assert said.encode() in picture.read_bytes(), command


def test_figures_of_dgc_are_those_of_real_frames():
    page = (ROOT / "docs/methods/dgc.md").read_text()
    rows = re.findall(r"^\| (.*?) ?\| ([\d.]+) kB \| (\d+)x \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for options, kilobytes, times in rows:
        if "compact" in options:
            method = DGC.compact(density=0.001)
        else:
            method = DGC(density=0.001, **eval(f"dict({options.strip('`')})"))
        count, ratio = sent_for_resnet50(method)
        # The last bytes of packed indices depend on where the elements are.
        assert count / 1000 == pytest.approx(float(kilobytes), abs=0.2)
        assert ratio == pytest.approx(float(times), rel=3e-3)


def said(folder: str) -> str:
    """All texts in the sources of a folder, with ``...`` for what is filled in."""

    def text_of(node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(text_of, node.values))
        if isinstance(node, ast.Constant):
            return str(node.value)
        named = isinstance(node, ast.FormattedValue) and getattr(node.value, "id", None)
        return str(constants.get(named, "..."))

    texts = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text())
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        texts += [text_of(n) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr | ast.Constant)]
    return "\n".join(texts)


#: said by MPI
OTHERS = {
    "MPI_Init_thread",
    "There are not enough slots available in the system",
    "mpirun has detected an attempt to run as root",
}


def test_troubleshooting_quotes_what_is_said():
    page = (ROOT / "docs/troubleshooting.md").read_text().partition("\n## ")[0]
    symptoms = [row.split("|")[1] for row in page.splitlines() if row.startswith("| ")][1:]
    quotes = {quote for symptom in symptoms for quote in re.findall("`(.*?)`", symptom)} - OTHERS
    sources = "\n".join(map(said, ("hvd_compress", "torch_impl", "tf")))
    assert len(quotes) > 12
    for quote in quotes:
        name, _, text = quote.rpartition("Error: " if "Error: " in quote else "Timeout: ")
        if name:
            assert re.search(
                f"class {name}(Error|Timeout)", (ROOT / "hvd_compress/errors.py").read_text()
            )
        assert text.strip(". ") in sources, quote
