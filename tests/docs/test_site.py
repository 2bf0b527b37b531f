"""The pages are a site without broken links, and its API pages say what the docstrings say."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.project import toml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
#: written by hand: those of the API are built
PAGES = sorted(
    str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if page.parent != DOCS / "api"
)


def script(name: str):
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / f"scripts/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


docs = script("docs")


@pytest.fixture(scope="module")
def api():
    return script("api")


@pytest.fixture(scope="module")
def written(api):
    return api.pages()


def pages_of(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [
        page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(part)
    ]


def test_every_page_is_in_the_navigation_once(written):
    config = toml("zensical.toml")
    expected = sorted([*PAGES, *(f"api/{name}" for name in written)])
    assert sorted(pages_of(config["project"]["nav"])) == expected


@pytest.mark.parametrize("page", [p for p in PAGES if not p.startswith("methods/")])
def test_the_index_and_the_table_of_methods_name_every_page(page):
    assert page == "index.md" or f"({page})" in (DOCS / "index.md").read_text()


def test_the_site_has_no_broken_links(tmp_path, api, written):
    """Zensical looks at links to pages, and this at all that it has written."""
    if not docs.ZENSICAL.is_dir():
        pytest.skip("Zensical is not there: it needs Python 3.11, and make setup installs it")
    shutil.copytree(DOCS, tmp_path / "docs")
    api.write(written, tmp_path / "docs" / "api")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    done = docs.build(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No issues found" in done.stdout + done.stderr
    site = tmp_path / "site"
    texts = {page: page.read_text() for page in site.rglob("*.html") if page.name != "404.html"}
    assert len(texts) == len(PAGES) + len(written)
    anchors = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    for page, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match("https?:|data:", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{page.relative_to(site)}: {link}"
            if anchor and not anchor.startswith("__"):
                assert anchor in anchors[target], f"{page.relative_to(site)}: {link}"
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)', text)
        assert not loaded, "the site loads nothing from elsewhere"


def test_every_public_name_is_on_an_api_page_once(api, written):
    for page in api.PAGES:
        parts = re.split(r"^## `([\w.]+)`$", written[f"{page.file}.md"], flags=re.MULTILINE)[1:]
        found = dict(zip(parts[::2], parts[1::2], strict=True))
        assert list(found) == list(page.modules)
        for path, text in found.items():
            headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
            [elsewhere] = re.findall("^Also here, from other pages: (.*)$", text, re.MULTILINE) or [
                ""
            ]
            named = headings + re.findall(r"\[`(\w+)`\]", elsewhere)
            module = importlib.import_module(path)
            public = [name.rpartition(".")[2] for name in api.names_of(module)]
            assert sorted(named) == sorted(public), path
            assert set(getattr(module, "__all__", ())) <= set(public)


def test_the_first_page_begins_with_the_names_that_most_programs_need(api, written):
    used = [name for names in api.MOST_USED.values() for name in names]
    assert len(used) == 20
    rows = re.findall(
        r"^\| \[`([\w.]+)`\]\(([\w-]+\.md)#\w+\) \| .+ \|$", written["index.md"], re.M
    )
    assert [name for name, _ in rows][:20] == used
    for name, page in rows[:20]:
        assert f"\n### {name.rpartition('.')[2]}\n" in written[page], f"{name} is not on {page}"


def test_every_public_name_has_a_description(api):
    for page in api.PAGES:
        for path in page.modules:
            module = importlib.import_module(path)
            for name in api.names_of(module):
                of = api.thing(module, name)
                assert not callable(of) or api.documented(of), f"{path}.{name}"


#: modules with a list that are for the rest of the package, or whose names have another home
INNER = {
    *("meetings", "codecs", "transforms"),  # hvd_compress.blocks
    *("auto", "integrations.exports", "integrations.mpi", "requests"),  # hvd_compress
    *("torch.optimizers", "backends", "fused", "kernels", "wire"),
    "torch.ddp",
    "torch.measures",  # torch.studies.measures
    "torch.triton.loops",
    *("tensorflow.mpi.collectives", "tensorflow.mpi.training"),  # tensorflow.mpi
    "tensorflow.keras.mpi_callbacks",  # tensorflow.keras.mpi.callbacks
    *("mpi.process_sets", "torch.mpi.collectives"),  # torch.mpi
}


def test_every_list_of_public_names_has_a_page(api):
    shown = {path.removeprefix("hvd_compress").lstrip(".") for p in api.PAGES for path in p.modules}
    folders = {"hvd_compress": "", "torch_impl": "torch", "tf": "tensorflow"}
    for folder, prefix in folders.items():
        for file in (ROOT / folder).rglob("*.py"):
            if re.search("^__all__", file.read_text(), re.MULTILINE):
                parts = [prefix, *file.relative_to(ROOT / folder).with_suffix("").parts]
                name = ".".join(part for part in parts if part and part != "__init__")
                assert (name in shown) != (name in INNER), f"scripts/api.py has no page for {name}"


ASKED = r"\]\(https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)"


def test_answers_are_short():
    text = (DOCS / "faq.md").read_text()
    answers = re.split("^### ", text, flags=re.MULTILINE)[1:]
    assert len(answers) > 12
    for answer in answers:
        question, *lines = answer.strip().splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("## ")]
        assert question.endswith("?"), question
        assert len(lines) <= 12, question
        assert re.search(ASKED, answer), question
