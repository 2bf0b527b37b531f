"""What pages and commands recommend is what was measured."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks import masking
from hvd_compress import RandomK, TopK
from hvd_compress.advisor import CANDIDATES, MODELS, Network, choose, kept
from hvd_compress.cli.main import main
from mpi_examples.study import spread

ROOT = Path(__file__).resolve().parents[2]
#: rows of MNIST in docs/accuracy.md, by what ``advise`` calls them
ON_MNIST = {
    "linear": "linear, 8 bits",
    "topk:density=0.01": "top-k 1 %",
    "dgc:density=0.001": "DGC 0.1 %, warm-up",
    "dgc:compact": "DGC.compact 0.1 %, warm-up",
    "powersgd:rank=2": "PowerSGD, rank 2",
}


def text(page: str) -> str:
    return (ROOT / page).read_text()


def section(page: str, title: str) -> str:
    return text(page).partition(f"# {title}\n")[2].partition("\n## ")[0]


def number(table: str, name: str | None) -> float | None:
    """The first number of a row, if there is such a row."""
    found = re.search(rf"^\| `?{re.escape(str(name))}`? \| ([\d.]+)", table, re.MULTILINE)
    return float(found[1]) if found else None


def test_losses_in_the_page_are_those_of_the_runs():
    page, known = text("docs/accuracy.md"), json.loads(text("benchmarks/masking.json"))
    for cell in masking.PARTS["methods"]:
        keys = [key for seed in range(5) if (key := cell.key(seed)) in known]
        score = spread([known[key]["final"] for key in keys]).replace("+-", "±")
        assert f"| {cell.label} | {score} % |" in page
    groups = defaultdict(list)
    for key, run in json.loads(text("benchmarks/accuracy.json")).items():
        task, method, *_ = key.split()
        if task == "adam":
            groups[method].append(run["final"])
    assert len(groups) == 6
    for method, finals in groups.items():
        assert f"| `{method}` | {spread(finals).replace('+-', '±')} |" in page


@pytest.mark.parametrize("candidate", CANDIDATES[2:], ids=lambda candidate: candidate.method)
def test_what_advise_says_of_losses_is_in_the_page(candidate):
    mnist, adamw = (section("docs/accuracy.md", title) for title in ("MNIST", "AdamW"))
    points = number(mnist, ON_MNIST.get(candidate.method))
    perplexity = number(adamw, candidate.method)
    lost = points and round(number(mnist, "dense") - points, 2)
    assert candidate.lost_sgd == lost
    more = perplexity and round(100 * (perplexity / number(adamw, "none") - 1), 1)
    assert candidate.lost_adamw == more
    if candidate.accuracy == "measured":
        assert lost <= 0.1
        assert more <= 0.5


def test_advise_writes_no_method_that_loses():
    accuracies = {candidate.method: candidate.accuracy for candidate in CANDIDATES}
    for model, ranks, rate in itertools.product(MODELS, (2, 16, 64), (1e8, 1e9, 1e10, 1e11)):
        chosen = choose(kept(model), Network(ranks, rate), backward=0.1)
        assert accuracies[chosen] in ("exact", "measured")


def test_advise_prints_what_its_page_shows(capsys):
    page = text("docs/advise.md")
    command = re.search(r"^    hvd-compress (advise .*)$", page, re.MULTILINE)[1]
    main(command.split())
    said = capsys.readouterr().out.splitlines()[:4]
    assert "\n".join(f"    {line}".rstrip() for line in said) in page


def test_defaults_are_what_pages_say():
    assert f"the default is {100 * TopK().density:g} %, GRACE's" in text("docs/migration.md")
    assert f"at {100 * TopK().density:g} %, its default" in " ".join(
        text("docs/methods/topk.md").split()
    )
    assert f"| `density={RandomK().density}`, the default |" in text("docs/methods/sparsifiers.md")


def test_no_page_recommends_what_diverges():
    pages = ("README.md", "docs/faq.md", "docs/migration.md", "docs/training/choosing.md")
    for page in pages:
        assert "RandomK(density=0.01)" not in text(page)
        assert not re.search(r'DiLoCo[^|\n]*compression="(topk|dgc)', text(page)), page


def test_where_powersgd_is_recommended_its_times_on_a_gpu_are_said():
    table = section("docs/performance.md", "Times on a GPU")
    theirs, ours = (
        int(re.search(rf"^\| {name}, rank 2 \| \d+ \| (\d+) \|", table, re.MULTILINE)[1])
        for name in ("PyTorch's hook: PowerSGD", "`powersgd`")
    )
    for page in ("README.md", "docs/migration.md"):
        assert f"{ours / theirs:.1f} times" in text(page)
    for page in ("docs/faq.md", "docs/methods/powersgd.md"):
        assert f"{theirs} ms" in text(page)
        assert f"ours took {ours}" in text(page)


def test_rates_below_which_a_method_pays_are_the_worst_that_were_measured():
    found = re.search(r"paid below ([\d., and\n]+) Gbit/s", text("docs/advise.md"))[1]
    rates = [float(rate) for rate in re.findall(r"[\d.]+\d", found)]
    assert len(rates) == 4
    worst = int(min(rates))
    assert f"below {worst} Gbit/s | `hvd.DGC" in text("README.md")
    assert f"below {worst} Gbit/s" in text("docs/methods/dgc.md")
