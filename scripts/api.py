"""Write the pages of the API, ``docs/api/*.md``, from docstrings: ``python scripts/api.py``.

No plugin of the site is used: many names are made when a package is imported, as is
``hvd.Codistillation``, so readers of sources miss them.  ``make docs`` runs it;
``tests/docs/test_site.py`` demands that each public name stands on a page once.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any, NamedTuple

API = Path(__file__).resolve().parent.parent / "docs" / "api"


ALL = "hvd_compress"


class Page(NamedTuple):
    file: str
    title: str
    modules: tuple[str, ...]
    #: what examples of the page take for granted, as a program
    begin: str


def page_of(file: str, title: str, modules: str, also: str = "", framework: str = "") -> Page:
    """Return the page of some modules of the package.

    Its examples begin with the lines of ``also``, or with those of a binding of a framework, and
    with all names of the modules.  An empty name is the package itself.
    """
    paths = tuple(f"{ALL}.{name}".rstrip(".") for name in modules.split(" "))
    if framework:
        binding = modules.partition(" ")[0].removesuffix(".lightning")
        also = f"{framework}\nimport {ALL}.{binding} as hvd\nhvd.init()"
    lines = [
        "import numpy as np",
        *([also] if also else []),
        *(f"from {x} import *" for x in paths),
    ]
    return Page(file, title, paths, "\n".join(lines))


WORLD = f"from {ALL}.engines.lockstep import World"
LOCAL = f"from {ALL}.engines.local import LocalEngine\n{WORLD}"
ROUNDS = f"{LOCAL}\nfrom {ALL}.systems.rounds import *"
TORCH, TF, KERAS = (
    "import torch",
    "import tensorflow as tf",
    "import keras\nimport tensorflow as tf",
)
BOTH = "{0} {0}.callbacks"
COMMON = (
    page_of("methods", "Methods and schedules", "methods learned advisor.auto schedules", WORLD),
    page_of(
        "training",
        "Training methods",
        "systems.rounds systems.graphs systems.teachers",
        f"from {ALL}.systems import Ranks",
    ),
    page_of(
        "stats", "Statistics", "stats integrations.logs", f"{LOCAL}\nfrom {ALL}.reduce import *"
    ),
    page_of("errors", "Errors", "errors", f"import {ALL} as hvd\n{WORLD}"),
)
FRAMEWORKS = (
    page_of("torch", "PyTorch", "torch", framework=TORCH),
    page_of("trainers", "Trainers", "torch.lightning torch.transformers", framework=TORCH),
    page_of("keras", "Keras", BOTH.format("tensorflow.keras"), framework=KERAS),
    page_of("tensorflow", "TensorFlow", "tensorflow", framework=TF),
    page_of("torch-mpi", "PyTorch over MPI", "torch.mpi", framework=TORCH),
    page_of("keras-mpi", "Keras over MPI", BOTH.format("tensorflow.keras.mpi"), framework=KERAS),
    page_of("tensorflow-mpi", "TensorFlow over MPI", "tensorflow.mpi", framework=TF),
    page_of("mpi", "Collectives over MPI", "mpi", f"import {ALL}.mpi\nfrom mpi4py import MPI"),
)
INTERNALS = (
    page_of("internals", "Internals", " reduce testing systems systems.servers advisor", ROUNDS),
    page_of("blocks", "Building blocks", "blocks", f"from {ALL} import Context\n{WORLD}"),
    page_of("optimizers", "Formulas of optimizers", "optimizers"),
    page_of("studies", "Studies", "studies.measures torch.studies.measures"),
)
#: a name stands on the first of these that has it
PAGES = COMMON + INTERNALS + FRAMEWORKS
#: the names that most programs need, by use: first on their pages, and on the first page
MOST_USED = {
    "Average gradients": (
        "torch.DistributedOptimizer",
        "torch.DDPState",
        "torch.ddp_hook",
        "torch.compress_shards",
        "torch.compress_replicas",
        "tensorflow.keras.DistributedOptimizer",
        "tensorflow.DistributedGradientTape",
    ),
    "Trainers": (
        "torch.lightning.CompressedDDPStrategy",
        "torch.transformers.CompressedTrainer",
    ),
    "Methods": (
        "methods.DGC",
        "methods.TopK",
        "methods.PowerSGD",
        "methods.FP16",
        "methods.LinearQuantization",
    ),
    "Schedules and training methods": (
        "schedules.warmup_to",
        "systems.rounds.LocalSGD",
        "systems.rounds.DiLoCo",
    ),
    "Statistics and checkpoints": (
        "stats.Stats",
        "integrations.logs.log_stats",
        "tensorflow.keras.callbacks.CompressionCallback",
    ),
}
#: names of modules that have no list, or that are there beside it: made when they are asked for, or
#: classes of what is returned
MORE = {
    f"{ALL}.advisor.auto": ["Auto"],
    f"{ALL}.integrations.logs": ["log_stats"],
    f"{ALL}.schedules": [
        "After",
        "ExponentialWarmup",
        "PAPER_DENSITIES",
        "StagedWarmup",
        "warmup_to",
    ],
    f"{ALL}.stats": ["Record", "Stats"],
    f"{ALL}.testing": ["check_laws"],
    f"{ALL}.torch": [
        "DistributedOptimizer",
        "optimizers.binding.ParameterBinding",
        "optimizers.compressed_optimizer.CompressedOptimizer",
        "optimizers.local_steps.LocalStepsOptimizer",
    ],
    f"{ALL}.tensorflow": ["DistributedGradientTape", "binding.VariableBinding"],
    f"{ALL}.tensorflow.keras": ["DistributedOptimizer", "*OPTIMIZERS", "*SYSTEMS"],
    f"{ALL}.tensorflow.keras.callbacks": ["CompressionCallback"],
    f"{ALL}.tensorflow.keras.mpi": ["*OPTIMIZERS", "*SYSTEMS"],
}


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module: the most used ones, then all others.

    Names with dots are those of modules inside of it.
    """
    names = list(getattr(module, "__all__", ()))
    for name in MORE.get(module.__name__.replace("torch_impl", f"{ALL}.torch"), ()):
        names += getattr(module, name[1:]) if name.startswith("*") else [name]
    used = [each.rpartition(".") for names in MOST_USED.values() for each in names]
    first = [name for path, _, name in used if f"{ALL}.{path}" == module.__name__]

    def place(name: str) -> tuple[Any, ...]:
        short = name.rpartition(".")[2]
        at = first.index(short) if short in first else len(first) + (short in OF_RETURNED)
        return at, short.lower(), name

    return sorted(set(names), key=place)


def thing(module: ModuleType, name: str) -> Any:
    inside, _, last = name.rpartition(".")
    return getattr(
        importlib.import_module(f"{module.__name__}.{inside}") if inside else module, last
    )


INTRODUCTION = """\
Users of PyTorch import `hvd_compress.torch as hvd`, users of Keras
`hvd_compress.tensorflow.keras as hvd`. Each has all names of the Horovod package that it replaces,
and this package's methods, schedules, training methods and errors.

The first tables have the names that most programs need. The pages below them have all public names,
from their docstrings. Names on no page may change in any release.

Every call may raise these [errors](errors.md), which texts do not repeat: `ConfigError` or
`UnsupportedError` for an option or an array that it cannot honour, `MismatchError` if ranks differ
in options, shapes or dtypes, `PayloadError` for a damaged message, `SetupError` before
`hvd.init()`, and `CollectiveTimeout` if a rank does not answer."""
#: what users need of classes that they do not make themselves
_OF_BINDINGS = {"epoch", "method", "report_at_exit", "reset_stats", "set_epoch", "stats", "step"}
OF_RETURNED = {
    "ParameterBinding": _OF_BINDINGS,
    "VariableBinding": _OF_BINDINGS,
    "CompressedOptimizer": {
        "add_param_group",
        "compression",
        "consolidate_state_dict",
        "load_state_dict",
        "set_backward_passes_per_step",
        "skip_synchronize",
        "state_dict",
        "step",
        "synchronize",
        "synchronize_parameters",
        "zero_grad",
    },
    "LocalStepsOptimizer": set(),  # all
}
#: what an optimizer over a formula has for the rest of the package
INNER = {"begin_step", "binding", "compression_options", "formula_of", "update"}


# --- Docstrings to Markdown


def markdown(text: str) -> str:
    """Return a docstring as Markdown: its literals, literal blocks and lists of arguments."""
    return "\n\n".join(_blocks(inspect.cleandoc(text).splitlines()))


#: what Markdown would read as markup
_SPECIAL = re.compile(r"([*<\[\]]|(?<!\w)_|_(?!\w))")


def _blocks(lines: list[str]) -> list[str]:
    """Paragraphs, one after the other; indented lines belong to the paragraph above them."""
    blocks, at = [], 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        start = at
        while at < len(lines) and lines[at].strip() and not (at > start and lines[at][0] == " "):
            at += 1
        paragraph, start = lines[start:at], at
        if paragraph[0].startswith(">>>"):  # to the next empty line, whatever is indented
            while at < len(lines) and lines[at].strip():
                at += 1
            blocks.append(_example(lines[start - len(paragraph) : at]))
            continue
        while at < len(lines) and (not lines[at].strip() or lines[at][0] == " "):
            at += 1
        inner = textwrap.dedent("\n".join(lines[start:at])).strip("\n")
        blocks += _block(paragraph, inner)
    return blocks


def _block(paragraph: list[str], inner: str) -> list[str]:
    first = paragraph[0]
    if paragraph[-1].endswith("::"):
        said = prose([*paragraph[:-1], paragraph[-1][:-1]])
        return [said, f"```{'python' if _is_program(inner) else 'text'}\n{inner}\n```"]
    if inner and paragraph[-1].endswith(":"):
        return [_title(prose(paragraph)), _items(inner)]
    if first.startswith("- "):
        joined = "\n".join(paragraph + [f"  {line}" for line in inner.splitlines()])
        items = re.split(r"^- ", joined, flags=re.MULTILINE)[1:]
        return ["\n".join(f"- {prose(item.strip().split(chr(10)))}" for item in items)]
    return [prose(paragraph), *_blocks(inner.splitlines())]


def _example(lines: list[str]) -> str:
    return "\n".join(["```pycon", *lines, "```"])


def _is_program(text: str) -> bool:
    try:
        compile(text, "docstring", "exec")
    except SyntaxError:
        return False
    return True


def _title(text: str) -> str:
    return f"**{text}**" if " " not in text else text


def _items(inner: str) -> str:
    """Entries ``name: text``, of which each may go on in lines that are indented."""
    entries = re.split(r"\n+(?=\S)", inner)
    items = []
    for entry in entries:
        text = re.sub(r"\s*\n\s*", " ", entry)
        if named := re.match(r"([*\w., ]+?|``.+?``): (.*)", text):
            names = ", ".join(f"`{one.strip('` ')}`" for one in named[1].split(","))
            items.append(f"- {names}: {prose([named[2]])}")
        else:
            items.append(f"- {prose([text.removeprefix('- ')])}")
    return "\n".join(items)


def prose(lines: list[str]) -> str:
    """One paragraph in one line, with literals as Markdown has them."""
    text = " ".join(line.strip() for line in lines)
    text = re.sub(r":(?:class|func|meth|mod|attr):`~?(?:[\w.]*\.)?(\w+)`", r"``\1``", text)
    escaped = (
        f"`{part[2:-2]}`" if part.startswith("``") else _SPECIAL.sub(r"\\\1", part)
        for part in re.split(r"(``.+?``)", text)
    )
    return "".join(escaped)


# --- Objects to Markdown


def signature(name: str, of: Any) -> str:
    """Return how it is called, as a block of code; empty if it cannot be said."""
    try:
        found = inspect.signature(of)
    except (TypeError, ValueError):
        return ""
    parameters = [p for p in found.parameters.values() if p.name not in {"self", "cls"}]
    texts = [_parameter(p) for p in parameters]
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    result = found.return_annotation
    arrow = "" if result is found.empty or is_class(of) else f" -> {_annotation(result)}"
    line = f"{name}({', '.join(texts)}){arrow}"
    if len(line) > 88:
        line = "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){arrow}"])
    return f"```python\n{line}\n```"


def _annotation(of: Any) -> str:
    return of if isinstance(of, str) else inspect.formatannotation(of)


def _parameter(p: inspect.Parameter) -> str:
    star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    noted = "" if p.annotation is p.empty else f": {_annotation(p.annotation)}"
    if p.default is p.empty:
        return f"{star}{p.name}{noted}"
    return f"{star}{p.name}{noted}{' = ' if noted else '='}{_default(p.default)}"


def _default(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    text = getattr(value, "__name__", None) or repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def members(of: type, public: set[type]) -> list[tuple[str, Any]]:
    """The public methods and properties of a class with docstrings, but those of a base class that
    has an entry of its own.  A method, a block or a system shows only those that are new in it: all
    others stand at their base class."""
    configurable = importlib.import_module(f"{ALL}.config").Configurable
    bases = [cls for cls in of.__mro__ if cls.__module__.startswith(ALL) and cls != configurable]
    is_one_of_many = configurable in of.__mro__ and configurable not in of.__bases__
    found = {}
    for cls in [of] if is_one_of_many else reversed(bases):
        if cls is not of and cls in public:
            continue
        for name, value in vars(cls).items():
            again = any(name in vars(base) for base in bases[1:])
            if name.startswith("_") or name in INNER or (is_one_of_many and again):
                continue
            inner = getattr(value, "__func__", getattr(value, "func", value))
            if not (isinstance(inner, property) or inspect.isfunction(inner)) or not inner.__doc__:
                continue
            if not inner.__doc__.startswith("See "):
                found[name] = property(inner) if hasattr(value, "func") else inner
    return sorted(found.items())


def is_class(of: Any) -> bool:
    """Whether it is a class, and not such as ``dict[str, int]``, which Python 3.10 calls one."""
    return inspect.isclass(of) and not isinstance(of, GenericAlias)


def entry(name: str, of: Any, public: set[type]) -> str:
    """Return the text below the heading of an object."""
    if isinstance(of, ModuleType):
        return markdown((of.__doc__ or "").partition("\n\n")[0])
    if not (is_class(of) or inspect.isroutine(of)):
        shown = repr(of)
        short = shown if len(shown) < 300 and " at 0x" not in shown else type(of).__name__
        return f"```python\n{name} = {short}\n```"
    called = signature(name, of) if name not in OF_RETURNED else ""
    parts = [called, markdown(documented(of))]
    if is_class(of):
        for member, value in members(of, public):
            if member not in (OF_RETURNED.get(name) or {member}):
                continue
            called = "" if isinstance(value, property) else signature(member, value)
            parts += [f"#### {name}.{member}", called, markdown(value.__doc__)]
    return "\n\n".join(part for part in parts if part)


def documented(of: Any) -> str:
    """The docstring of an object itself, and not what ``dataclass`` or a base class puts there.
    One that replaces a function of Horovod ends with its docstring, which is not copied."""
    text = inspect.cleandoc(of.__doc__ or "")
    if is_class(of) and not text:  # one of a library's own says nothing of this class
        ours = [cls for cls in of.__mro__ if cls.__module__.startswith(ALL)]
        text = next((inspect.cleandoc(cls.__doc__) for cls in ours if cls.__doc__), "")
    if is_class(of) and text.startswith(f"{of.__name__}("):
        return ""
    own, found, _ = text.partition("All else:")
    return f"{own}All other options are Horovod's." if found else text


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")


class Writer:
    """Writes one page after the other, and knows where each object and each text stands."""

    def __init__(self) -> None:
        modules = [importlib.import_module(path) for page in PAGES for path in page.modules]
        things = [thing(module, name) for module in modules for name in names_of(module)]
        self.public = {of for of in things if is_class(of)}
        self.places: dict[Any, str] = {}
        self.texts: list[tuple[str, str]] = []

    def page(self, page: Page) -> str:
        parts = [f"# {page.title}", "<!-- written by scripts/api.py -->"]
        parts += ["Examples of this page begin with:", f"```python\n{page.begin}\n```"]
        taken: set[str] = set()
        for path in page.modules:
            module = importlib.import_module(path)
            parts += [f"## `{path}`", markdown(module.__doc__ or "")]
            taken.add(slug(path))
            elsewhere, own = [], []
            for name in names_of(module):
                of, short = thing(module, name), name.rpartition(".")[2]
                # small values are one object wherever they come from
                key = (short, repr(of)) if isinstance(of, str | int | float | tuple) else id(of)
                if key in self.places:
                    elsewhere.append(f"[`{short}`]({self.places[key]})")
                    continue
                anchor = slug(short)
                self.places[key] = f"{page.file}.md" + f"#{anchor}" * (anchor not in taken)
                taken.add(anchor)
                own += [f"### {short}", self.entry(short, of, self.places[key])]
            parts += own
            parts += [f"Also here, from other pages: {', '.join(elsewhere)}."] if elsewhere else []
        return "\n\n".join(part for part in parts if part) + "\n"

    def entry(self, name: str, of: Any, place: str) -> str:
        """Return the text below a heading, a short one if most of it stands elsewhere."""
        text = documented(of) if callable(of) else ""
        if not text:
            return entry(name, of, self.public)
        for other, there in self.texts:
            if text.startswith(other) or other.startswith(text):
                first = markdown(re.sub(r":+$", ".", text.partition("\n\n")[0]))
                parts = [signature(name, of), first, f"More: [`{name}`]({there})."]
                return "\n\n".join(part for part in parts if part)
        self.texts.append((text, place))
        return entry(name, of, self.public)


def pages() -> dict[str, str]:
    """Return the text of each page of the API by its file's name."""
    writer = Writer()
    written = {f"{page.file}.md": writer.page(page) for page in PAGES}
    return written | {"index.md": index(writer)}


def index(writer: Writer) -> str:
    """Return the first page: the most used names, then all modules."""
    parts = ["# API", "<!-- written by scripts/api.py -->", INTRODUCTION]
    for use, names in MOST_USED.items():
        parts += [f"## {use}", _table("name", "use", [_used(name, writer) for name in names])]
    for title, pages in (
        ("All modules", FRAMEWORKS + COMMON),
        ("Modules for developers", INTERNALS),
    ):
        rows = [_module(path, page) for page in pages for path in page.modules]
        parts += [f"## {title}", _table("module", "contents", rows)]
    return "\n\n".join(parts) + "\n"


def _table(left: str, right: str, rows: list[str]) -> str:
    return "\n".join([f"| {left} | {right} |", "|---|---|", *rows])


def _used(name: str, writer: Writer) -> str:
    path, _, short = f"{ALL}.{name}".rpartition(".")
    of = getattr(importlib.import_module(path), short)
    return f"| [`{name}`]({writer.places[id(of)]}) | {_first_sentence(documented(of))} |"


def _module(path: str, page: Page) -> str:
    said = _first_sentence(importlib.import_module(path).__doc__ or "")
    return f"| [`{path}`]({page.file}.md#{slug(path)}) | {said} |"


def _first_sentence(doc: str) -> str:
    return prose(re.split(r"\n\n|(?<=\.)(?<!al\.)\s|::|;", doc.strip())[0].splitlines()).rstrip(
        ":."
    )


def write(texts: dict[str, str], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file, text in texts.items():
        (folder / file).write_text(text)


if __name__ == "__main__":
    write(pages(), API)
