"""Recommendations of pages and commands are those that were measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import hvd_compress
from benchmarks.quality import WARM_UP
from hvd_compress import RandomK, TopK, as_compressor
from hvd_compress.advisor.losses import all_losses, losses_of
from hvd_compress.cli.main import main
from hvd_compress.errors import ConfigError
from hvd_compress.methods.texts import method_names

ROOT = Path(__file__).resolve().parents[2]


def text(page: str) -> str:
    return (ROOT / page).read_text()


def section(page: str, title: str) -> str:
    return text(page).partition(f"# {title}\n")[2].partition("\n## ")[0]


#: pages that recommend methods to users
PAGES = (
    *("README.md", "docs/ddp.md", "docs/fsdp.md", "docs/horovod.md", "docs/tensorflow.md"),
    *("docs/faq.md", "docs/migration.md", "docs/trainers.md", "docs/mpi-training.md"),
    *("docs/first-run.md", "docs/training/choosing.md", "docs/performance.md", "docs/methods.md"),
    *(f"docs/methods/{file.name}" for file in sorted((ROOT / "docs/methods").glob("*.md"))),
)


def row_of(code: str) -> str | None:
    """The row of a method that a page writes, such as ``hvd.TopK(density=0.01)`` or "topk:compact",
    or ``None`` if it was never trained."""
    code = re.sub(r"\bhvd(_compress)?\.", "", code.strip())
    code = repr(code) if code.partition(":")[0] in method_names() else code
    if re.match(r"\w+\.compressor\(|OneBitAdam\b", code):
        return "onebit_adam"
    try:
        method = as_compressor(eval(code, vars(hvd_compress)))  # of our own pages
    except (ConfigError, NameError, SyntaxError, TypeError, AttributeError):
        return None
    for row in {loss.method for loss in all_losses()}:
        name = row.removesuffix(WARM_UP)
        if name.partition(":")[0] != method.name:
            continue
        wanted = as_compressor(name)
        if row.endswith(WARM_UP) and hasattr(method, "density"):
            last = getattr(method.density, "densities", (None,))[-1]
            if last == wanted.density and replace(method, density=last) == wanted:
                return row
        elif method == wanted:
            return row
    return None


def classes_of(words: str) -> list[str]:
    """The optimizers that some words are about; all of them if they name none."""
    adam = re.search(r"Adam|LAMB|RMSprop", words) is not None
    found = ["adamw"] * adam + ["sgd"] * bool(re.search(r"\bSGD\b", words))
    return found or ["adamw", "sgd"]


def in_programs(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield (row, optimizer, where) of each method beside an optimizer in a program."""
    for block in re.findall(r"```python\n(.*?)```", text(page), re.DOTALL):
        kinds = re.findall(r"\.(SGD|Adam\w*|NAdam|RMSprop|LAMB)\(", block)
        call = r"[\w.]+\((?:[^()]|\([^()]*\))*\)"
        codes = re.findall(rf'compression=({call}|"[^"]+")', block)
        codes += re.findall(r'DDPState\(("[^"]+")', block)
        for code in codes if kinds else []:
            yield from ((row_of(code), name, code) for name in classes_of(" ".join(kinds)))


def in_tables(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield the same of tables of what to take, by optimizer or by what one has."""
    head = ""
    for line in text(page).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        head = (head or line) if line.startswith("|") else ""
        if (
            re.match(r"\| (optimizer|you have|you train with) \|", head)
            and line != head
            and "---" not in line
        ):
            for code in re.findall(r"`(?:compression=)?([^`]+)`", line):
                yield from ((row_of(code), name, line) for name in classes_of(cells[1]))


def in_sentences(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield the same of sentences that say "take", "use" or "write"."""
    prose = re.sub(r"```.*?```|^\|.*?$", "", text(page), flags=re.DOTALL | re.MULTILINE)
    for sentence in re.split(r"(?<=[.;:])\s+", prose):
        if re.search(
            r"\b(?<!not )([tT]ake|[uU]se|[wW]rite)\b(?! (neither|none|no|nothing)\b)", sentence
        ):
            for code in re.findall(r"`([^`]+)`", sentence):
                yield from ((row_of(code), name, sentence) for name in classes_of(sentence))


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_recommends_loses_no_more_than_is_tolerated(page):
    for row, optimizer, where in (*in_programs(page), *in_tables(page), *in_sentences(page)):
        for loss in losses_of(row, optimizer):
            assert loss.within(), f"{page}, {optimizer}: {row} lost {loss}: {where}"


def test_tables_of_what_to_take_name_what_was_trained():
    found = [(page, row) for page in PAGES for row in in_tables(page) if row[0]]
    assert {page for page, _ in found} == {
        *("README.md", "docs/methods.md", "docs/training/choosing.md")
    }
    for page, (row, optimizer, line) in found:
        losses = [*losses_of("bf16" if row == "fp16" and optimizer == "adamw" else row, optimizer)]
        assert losses, f"{page}: nobody has trained {row} with {optimizer}: {line}"
        if page != "docs/training/choosing.md":
            assert any(str(loss) in line for loss in losses), f"{row}: {losses}, not {line}"


def test_recommendations_are_found():
    found = {row[:2] for page in PAGES for row in (*in_programs(page), *in_sentences(page))}
    assert {("linear", "adamw"), ("topk:density=0.01", "sgd")} < found
    assert (
        row_of("hvd.DGC(density=hvd.warmup_to(0.001, epochs=4))") == f"dgc:density=0.001{WARM_UP}"
    )
    assert row_of('"powersgd:rank=2"') == row_of("hvd.PowerSGD(rank=2)") == "powersgd:rank=2"
    assert row_of("hvd.TopK(density=0.02)") is None
    assert classes_of("NAdam or SGD") == classes_of("any") == ["adamw", "sgd"]


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
