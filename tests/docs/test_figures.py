"""Each measured figure in a table of a page can be measured again, or a test holds it.

A table of figures has, in its section or in the beginning of its page, one of

- a comment that names the test that holds it, or the script that writes it:
  ``<!-- held by tests/docs/test_docs.py::test_... -->``, ``<!-- medians, by benchmarks/... -->``;
- a command of the repository that shows it again, and the month in which it was measured. A link
  whose text is "command" leads to the section that has the command.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from benchmarks import steps_report
from hvd_compress.cli.main import main
from hvd_compress.systems.graphs import as_topology, second_eigenvalue

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))

UNIT = r"(?:(?:ms|us|s|x|[kKMG]i?B|B|points)\b|%)"
#: a cell that begins with a number, its spread and its unit, and goes on with a remark at most
FIGURE = re.compile(rf"\**[+-]?\d[\d.,]*( ± [\d.]+)?( ?{UNIT})?\**(\\\*)?([,;(] ?.*| \(.*\))?")
DATE = re.compile(
    r"\b(January|February|March|April|May|June|July|August|September|October|November|December)"
    r"\s20\d\d\b"
)
#: tables of numbers that nobody measured, by page and first words of the head, with the reason
NOT_MEASURED = {
    ("docs/install.md", "| | tested |"): "versions",
    ("docs/trainers.md", "| package |"): "versions",
    ("docs/mpi.md", "| `algorithm` |"): "rounds, by formula",
    ("docs/sparse-collectives.md", "| function |"): "rounds, by formula",
    ("docs/biased-compression.md", "| operator |"): "proved constants",
    ("docs/decentralized.md", "| `method=` |"): "numbers of states and messages",
}


@dataclass(frozen=True)
class Table:
    """A table of a page; ``text`` is that of its section and of the beginning of the page."""

    page: str
    head: str
    rows: tuple[str, ...]
    text: str

    def figures(self) -> list[str]:
        """Its cells that are figures; defaults of options are none."""
        heads = [head.strip() for head in self.head.strip("|").split("|")]
        rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in self.rows)
        cells = (cell for row in rows for cell in zip(heads[1:], row[1:], strict=False))
        return [cell for head, cell in cells if FIGURE.fullmatch(cell) and head != "default"]

    def exempt(self) -> list[tuple[str, str]]:
        """The exceptions that it is one of."""
        return [(p, h) for p, h in NOT_MEASURED if p == self.page and self.head.startswith(h)]


def sections(page: str) -> list[tuple[str, str]]:
    """Heading and own text of each section; a comment in a program is no heading."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    text = code.sub(lambda found: found[0].replace("\n#", "\n #"), page)
    parts = re.split(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return [*zip(parts[1::2], parts[2::2], strict=True)]


def tables(page: str, text: str) -> Iterator[Table]:
    """The tables of a page that have more than one figure."""
    parts = sections(text)
    for heading, own in parts:
        around = own if heading == parts[0][0] else f"{parts[0][1]}\n{own}"
        for found in re.findall(r"(?:^\|.*\n?)+", own, re.MULTILINE):
            head, *rows = found.strip().splitlines()
            table = Table(page, head, tuple(rows[1:]), around)
            if len(table.figures()) > 1:
                yield table


def of_pages() -> list[Table]:
    return [table for page in PAGES for table in tables(page, (ROOT / page).read_text())]


def defines(file: Path, name: str) -> bool:
    tree = ast.parse(file.read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.walk(tree))


def holders(table: Table) -> list[str]:
    """The writers or holders of the table: files, or tests in them that know the page."""
    found = []
    for file, law in re.findall(r"<!-- .*?by ([\w/.]+\.py)(?:::(\w+))? -->", table.text):
        path = ROOT / file
        assert path.is_file(), f"{table.page}: there is no {file}"
        if law:
            assert defines(path, law), f"{table.page}: {file} has no {law}"
            assert Path(table.page).stem in path.read_text(), f"{file} does not read {table.page}"
        found.append(law or file)
    return found


def commands(table: Table) -> list[str]:
    """The commands of the repository that the table's text names."""
    text = table.text
    for page, anchor in re.findall(r"\[command\]\(([\w.-]*)#([\w-]+)\)", text):
        there = ((ROOT / table.page).parent / page).read_text() if page else text
        of = {heading.lower().replace(" ", "-"): own for heading, own in sections(there)}
        text += of[anchor]
    found = []
    programs = r"python(?: -m ([\w.]+)| ((?:benchmarks|tests|mpi_examples|scripts)/[\w/]+\.py))"
    for module, file in re.findall(programs, text):
        path = ROOT / (file or module.replace(".", "/"))
        there = [path, path.with_suffix(".py"), path / "__main__.py"]
        assert any(own.is_file() for own in there), f"{table.page}: no {module or file}"
        found.append(module or file)
    for name in re.findall(r"\bhvd-compress (\w+)", text):
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0, f"{table.page}: there is no command {name}"
        found.append(name)
    return found


@pytest.mark.parametrize("table", of_pages(), ids=lambda t: f"{t.page} {t.head[:50]}")
def test_figures_are_held_or_can_be_measured_again(table, capsys):
    if not table.exempt() and not holders(table):
        assert commands(table), "the section names neither a command nor who holds the figures"
        assert DATE.search(table.text), "the section does not say when they were measured"


def test_exceptions_are_needed():
    assert {own for table in of_pages() for own in table.exempt()} == {*NOT_MEASURED}
    assert not [table for table in of_pages() if table.exempt() and holders(table)]


def test_this_test_would_notice():
    row = "| | time |\n|---|---|\n| a | 5 ms |\n| b | 6.5 ± 0.1 % |\n"
    text = "# A\n\nBegin\n\n## B\n\n```python\n# no heading\n```\n" + row
    [table] = tables("README.md", text)
    assert table.figures() == ["5 ms", "6.5 ± 0.1 %"]
    assert (holders(table), commands(table), DATE.search(table.text)) == ([], [], None)
    with pytest.raises(AssertionError, match=r"no mpi_examples\.never"):
        commands(Table("README.md", "", (), "python -m mpi_examples.never"))
    with pytest.raises(AssertionError, match=r"there is no tests/never\.py"):
        holders(Table("README.md", "", (), "<!-- held by tests/never.py::test_a -->"))
    law = "<!-- held by tests/docs/test_figures.py::test_never -->"
    with pytest.raises(AssertionError, match="has no test_never"):
        holders(Table("README.md", "", (), law))
    assert [*tables("a.md", "# A\n| | b |\n|---|---|\n| c | one step of 5 ms |\n")] == []


def cells(page: str, section: str) -> dict[str, list[str]]:
    """The rows of a section's tables, by their first cells."""
    own = dict(sections((ROOT / page).read_text()))[section]
    rows = [line.strip("|").split("|") for line in own.splitlines() if line.startswith("|")]
    return {first.strip(): [cell.strip() for cell in rest] for first, *rest in rows}


def test_times_on_a_gpu_are_repeated():
    """docs/advise.md has two of docs/performance.md with a busy backward."""
    busy = {name: row[1] for name, row in cells("docs/performance.md", "Times on a GPU").items()}
    dgc, hook = busy["`dgc`, 0.1 %"], busy["PyTorch's hook: fp16"]
    said = f"DGC took {dgc} ms beyond a busy backward, and PyTorch's fp16 hook {hook}."
    assert said in text_of("docs/advise.md")


def test_losses_of_shards():
    found = json.loads((ROOT / "benchmarks/shards.json").read_text())

    def losses(way):
        return np.array([found[f"quality: {way}, seed {seed}"]["loss"] for seed in range(3)])

    dense = losses("FSDP2 float32")
    rows = cells("docs/fsdp.md", "Loss")
    ways = {name.strip('"'): row for name, row in rows.items() if name.startswith('"')}
    assert ways
    for way, row in ways.items():
        lost = 100 * (losses(way) / dense - 1)
        seeds = ", ".join(f"{each:+.2f}" for each in lost)
        assert row == [f"{losses(way).mean():.4f}", f"{lost.mean():+.2f} %", seeds]
    assert rows["FSDP2 in float32"][0] == f"{dense.mean():.4f}"


def test_times_of_shards():
    found = json.loads((ROOT / "benchmarks/shards.json").read_text())
    names = {
        "FSDP2 in float32": "FSDP2 float32",
        "FSDP2 in bfloat16": "FSDP2 bfloat16",
        '"linear"': "linear in bfloat16",
        '"linear", `parameters="linear"`': "linear, parameters in bfloat16",
        '"linear:bits=4", `parameters="linear:bits=4"`': "linear:bits=4, parameters in bfloat16",
        '"linear:bits=4", `parameters="linear"`, `nodes=2`': (
            "linear:bits=4, nodes, parameters in bfloat16"
        ),
    }
    rows = cells("docs/fsdp.md", "Times")
    shares = {}
    for label, way in names.items():
        ours = [found[f"times, {network}: {way}"] for network in ("1gbit", "10gbit")]
        assert rows[label] == [
            *(f"{ours[0][what] / 1e3:,.0f} kB" for what in ("gradients", "parameters")),
            *(f"{1e3 * x['median']:,.0f} ms ({1e3 * x['least']:,.0f})" for x in ours),
        ]
        shares[label] = [x["median"] for x in ours]
    text = dict(sections((ROOT / "docs/fsdp.md").read_text()))["Times"]
    dense, _, eight, four = [shares[label] for label in names][1:5]
    said = [f"{own[i] / dense[i]:.2f}" for i in (0, 1) for own in (eight, four)]
    assert re.findall(r"0\.\d\d", text.partition("\nAt 1 Gbit/s")[2].partition("\n\n")[0]) == said


def test_times_with_slow_workers(capsys):
    main(["stragglers"])
    said = re.findall(r"^(\w[\w ]*?) +32 +(.*)$", capsys.readouterr().out, re.MULTILINE)
    rows = cells("docs/training/stragglers.md", "Waiting for slow workers")
    assert len(said) == 4
    for name, figures in said:
        assert rows[name] == figures.split()


def test_gaps_of_topologies():
    rows = cells("docs/decentralized.md", "Topologies")
    gaps = {name: row[1] for name, row in rows.items() if FIGURE.fullmatch(row[1])}
    assert len(gaps) == 7
    for name, gap in gaps.items():
        topology = as_topology(re.search(r'"(.*?)"', name)[1])
        expected = 1 - second_eigenvalue(topology.weights(16))
        assert gap == f"{expected:.{len(gap[2:])}f}", name


#: cells of docs/accuracy.md: section, row and column after the row's name
Cell = tuple[str, str, int]
ONE_BIT: Cell = ("AdamW", "`onebit_adam`", 1)
TOP_K_SGD: Cell = ("MNIST", "`topk:density=0.01`", 1)
POWER_SGD_2: Cell = ("MNIST", "`powersgd:rank=2`", 1)
DGC: Cell = ("MNIST", "`dgc:density=0.001, warm-up`", 1)
LINEAR: tuple[Cell, ...] = (("MNIST", "`linear`", 1), ("AdamW", "`linear`", 1))
TOP_K: Cell = ("AdamW", "`topk:density=0.01`", 1)
POWER_SGD: Cell = ("AdamW", "`powersgd:rank=4`", 1)
HALF_A_BIT: Cell = (
    "AdamW",
    "`local_sgd:sync_every=2,start=120,unsent=stays,compression=onebit:column=512,via=allgather`",
    1,
)
DENSE: Cell = ("AdamW", "`none`", 0)
#: what pages repeat of docs/accuracy.md: how they say it, and what stands there
REPEATED: list[tuple[str, str, tuple[Cell, ...]]] = [
    ("README.md", "MNIST: {:.2f} points; text with AdamW: {:.2f} % of the loss", LINEAR),
    ("README.md", "MNIST: {:.2f} points; on a GPU", (POWER_SGD_2,)),
    ("README.md", "| MNIST: {:.2f} points |", (TOP_K_SGD,)),
    ("README.md", "MNIST: {:.2f} points; text: perplexity", (DGC,)),
    ("README.md", "lost {:.0f} % of the loss and PowerSGD {:.0f} %", (TOP_K, POWER_SGD)),
    ("README.md", "lost {:.1f} % of the loss at 51x", (HALF_A_BIT,)),
    ("docs/methods.md", "#adamw-in-half-a-bit), lost {:.1f} % of the loss", (HALF_A_BIT,)),
    ("docs/methods.md", "MNIST: {:.2f} points; text with AdamW: {:.2f} % of the loss", LINEAR),
    ("docs/methods.md", "MNIST: {:.2f} points |", (TOP_K_SGD,)),
    ("docs/methods.md", "MNIST: {:.2f} points |", (POWER_SGD_2,)),
    ("docs/methods.md", "MNIST: {:.2f} points; text: perplexity", (DGC,)),
    ("docs/methods.md", "lost {:.1f} % of the loss", (ONE_BIT,)),
    ("docs/methods/linear.md", "{:.2f} points with SGD on MNIST, {:.2f} % of the loss", LINEAR),
    ("docs/methods/onebit-adam.md", "it lost {:.1f} % of AdamW's loss", (ONE_BIT,)),
    ("docs/methods/powersgd.md", "rank 2 lost {:.2f} points", (POWER_SGD_2,)),
    ("docs/methods/powersgd.md", "rank 4 lost {:.0f} % of the loss", (POWER_SGD,)),
    ("docs/methods/quantisers.md", "ended at {:.2f} bits per byte, dense training at {:.2f}",
     (("AdamW", "`onebit`", 0), DENSE)),
    ("docs/methods/topk.md", "it loses {:.1f} points on MNIST", (TOP_K_SGD,)),
    ("docs/methods/topk.md", "at 1 % it lost {:.0f} % of the loss", (TOP_K,)),
    ("docs/training/choosing.md", "bits lost {:.2f} points with SGD, {:.2f} % of the loss", LINEAR),
    ("docs/training/choosing.md", "{:.2f} bits per byte, dense {:.2f}",
     (("AdamW", "`diloco:sync_every=10`", 0), DENSE)),
    ("docs/training/choosing.md", "perplexity 22.87, dense {:.2f}",
     (("Digits and words", "LSTM, perplexity", 0),)),
    ("docs/training/local-sgd.md", "perplexity of {:.2f} ±",
     (("Digits and words", "LSTM, perplexity", 0),)),
    ("docs/training/local-sgd.md", "ends at {:.2f} ± 0.53 %",
     (("Digits and words", "digits, accuracy", 0),)),
]  # fmt: skip
#: what they repeat of sentences there
OF_DGC = r"ends at ([\d.]+), where the dense run has ([\d.]+\d)"
#: a loss in a sentence
LOSS = re.compile(r"\d[\d.]* (?:points|bits per byte|% of the loss)|perplexity (?:of )?\d[\d.]*\d")
#: pages that have losses of their own, with their tables
OWN = ("methods/dgc.md", "training/local-sgd.md", "training/large-batch.md", "measures.md")
#: losses that are none, by page
NO_LOSS = {"docs/advise.md": ["0.2 points"]}  # a tolerance


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def repeated() -> dict[str, list[str]]:
    """The figures that each page has to say, by docs/accuracy.md."""
    found: dict[str, list[str]] = {}
    for page, words, places in REPEATED:
        figures = [cells("docs/accuracy.md", section)[row][at] for section, row, at in places]
        numbers = [float(re.match(r"[+-]?[\d.]+", figure)[0]) for figure in figures]
        found.setdefault(page, []).append(words.format(*numbers))
    page = text_of("docs/accuracy.md")
    of_dgc = "perplexity {}, dense {}".format(*re.search(OF_DGC, page).groups())
    for own in ("README.md", "docs/methods.md"):
        found[own].append(of_dgc)
    return found


def test_pages_repeat_the_losses_of_the_page_of_accuracy():
    for page, words in repeated().items():
        assert [own for own in words if own not in text_of(page)] == [], page


@pytest.mark.parametrize("page", [own for own in PAGES if not own.endswith(("accuracy.md", *OWN))])
def test_a_loss_in_a_page_is_one_of_accuracy(page):
    """Or that of a page with a table of its own, which ``REPEATED`` lists."""
    known = repeated().get(page, []) + NO_LOSS.get(page, [])
    losses = LOSS.findall(text_of(page))
    assert [loss for loss in losses if not any(loss in own for own in known)] == []


#: networks of benchmarks/steps.json
SHARED, SLOW = "shm", "4x1gbit"
#: what pages repeat of the times of ResNet-50: how they say it, the network, and the rows
TIMES = [
    ("docs/faq.md", "fp16 takes {} ms and float32 {}.", SHARED, ("Horovod fp16", "Horovod fp32")),
    ("docs/faq.md", "per tensor it takes {} ms", SHARED, ("plain top-k",)),
    ("docs/faq.md", "`TopK(density=0.001)` takes {} ms", SHARED, ("topk:density=0.001",)),
    ("docs/faq.md", "{} ms in float32 and {} in fp16", SLOW, ("Horovod fp32", "Horovod fp16")),
    ("docs/faq.md", "`DGC(density=0.001)` {}.", SLOW, ("dgc:density=0.001",)),
    ("docs/faq.md", "takes {} ms where fp16 takes {}", SLOW, ("onebit", "Horovod fp16")),
    ("docs/methods/dgc.md", "{} ms against {} at 1", SLOW, ("dgc:compact", "dgc:density=0.001")),
]


def test_pages_repeat_the_times_of_the_benchmark():
    rows = steps_report.cells(steps_report.read(ROOT / "benchmarks/steps.json"))
    for page, words, network, names in TIMES:
        own = rows[network, "torch", "resnet50", 0.0]
        said = words.format(*(f"{1000 * own[name].median:.0f}" for name in names))
        assert said in text_of(page), f"{page}: {said}"
    own = rows[SLOW, "torch", "resnet50", 0.0]
    beyond = [
        own[name].median - own["backward"].median for name in ("powersgd:rank=2", "Horovod fp16")
    ]
    said = "{:.0f} ms beyond backward, and fp16 {:.0f}".format(*(1000 * t for t in beyond))
    assert said in text_of("docs/faq.md")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--ranks 2 --bandwidth 100mbit --optimizer sgd",
            "expects {rank_2:.0f} ms per step with `powersgd:rank=2`, and {seconds:.1f} s with",
        ),
        (
            "--ranks 512 --bandwidth 10gbit",
            "expects {fp16:.0f} ms per step with fp16 and {rank_2:.0f} with PowerSGD",
        ),
    ],
)
def test_the_page_of_questions_repeats_what_advise_expects(options, words, capsys):
    main(["advise", "--model", "resnet50", *options.split()])
    said = capsys.readouterr().out
    fp16, rank_2 = (
        float(re.search(rf"^{name} +([\d.]+) ms", said, re.MULTILINE)[1])
        for name in ("fp16", "powersgd:rank=2")
    )
    assert words.format(fp16=fp16, rank_2=rank_2, seconds=fp16 / 1000) in text_of("docs/faq.md")
