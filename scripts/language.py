"""Check the English of pages, docstrings and messages: ``python scripts/language.py docs/ddp.md``.

Paths are pages, Python files or folders; without any, all in ``CHECKED`` are read.  Each finding is
a line with file, line, rule and sentence.  ``make lint`` runs it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: paths that ``make lint`` reads
CHECKED = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs",
    "hvd_compress",
    "scripts",
    "tf",
    "torch_impl",
)
#: paths in which no docstring begins with Of, What ...; users do not read them
BEGINNINGS = ("benchmarks", "mpi_examples", "tests")
#: parts of sentences that break a rule for a good reason
EXCEPTIONS: dict[str, str] = {}
#: what a sentence has at most; code in backquotes is one word
WORDS = 25


class Text(NamedTuple):
    """A paragraph, an entry of a list, or a message."""

    line: int
    text: str
    #: "page", "docstring", "property" or "message"
    kind: str


class Finding(NamedTuple):
    file: str
    line: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.sentence}"


# --- Rules

_EACH = (
    "batch|block|bucket|byte|column|core|element|entry|epoch|exchange|gradient|GPU|group|host|layer"
    "|machine|matrix|message|node|parameter|process|rank|round|row|run|second|step|tensor|thread"
    "|value|worker"
)
_QUANTITY = (
    r"\d[\w.,]*|[KMGT]i?B|[kKMGT]?bits?|bytes?|[mµun]?s|seconds?|minutes?|one|two|three|four|half"
    "|once|twice|times|steps|sent|received|numbers?|messages?|scales?|cores?|threads?|floats?"
    "|signs?|images|samples|tokens|sums?|passes|calls|%"
)
#: of each rule its name and what may be in no sentence
PHRASES = {
    "begins with Of, What, Who, Whose, Where or Else": (
        r"^\W*(?:Of|What|Whom?|Whose|Where|Else)\b(?!.*\?$)"
    ),
    "write 'per', not 'a'": rf"(?<![\w-])(?:{_QUANTITY}) (?:a|an) (?:{_EACH})\b(?! of)",
    "write 'instead of'": r"\bin (?:the )?place of\b|\bin (?:its|their|whose) place\b",
    "write 'not', not 'Never:'": r"\bNever:",
    "write 'after', 'below' or 'slower than', not 'behind'": r"(?<!\blag )(?<!\blags )\bbehind\b",
    "write 'again'": r"\banew\b",
    "write 'with `option=`'": r"\bby `\w+=",
    "write 'this many' or the number": r"\bso many (?!that|and\b)\w",
}
#: how no noun phrase begins: verbs, prepositions and questions
_NO_NOUN = re.compile(
    "(?:Return|Returns|Get|Give|Say|Says|Compute|Is|Are|It|How|When|Why|For|From|In|To|By|With|As"
    "|If|Make|Set|Made|Added|Sent|Read|Look)\\b"
)


def findings_in(texts: Iterable[Text], file: str) -> Iterator[Finding]:
    for text in texts:
        for number, (line, sentence) in enumerate(sentences(text)):
            if any(part in sentence for part in EXCEPTIONS):
                continue
            for rule in broken_rules(sentence, text.kind, first=number == 0):
                yield Finding(file, line, rule, sentence)


def broken_rules(sentence: str, kind: str, first: bool = True) -> Iterator[str]:
    """Name the rules that a sentence breaks, ``first`` that of its docstring or not."""
    for rule, pattern in PHRASES.items():
        if re.search(pattern, sentence):
            yield rule
    # A message says what is wrong, why, and what to write, with a colon or semicolon in between.
    parts = re.split("[:;] ", sentence) if kind == "message" else [sentence]
    if (count := max(map(words, parts))) > WORDS:
        yield f"{count} words, at most {WORDS}"
    if kind == "property" and first and _NO_NOUN.match(sentence):
        yield "a property is a noun phrase"


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in _shown(sentence).split())


def _shown(sentence: str) -> str:
    """A sentence with each piece of code as one word."""
    return re.sub(r"(`+)(.+?)\1", "code", sentence)


_END = re.compile(r"""[.!?][)"'*_]*\s+(?=[\W_]*[A-Z0-9`]|["'(]+\w)""")
#: an end with a point that is none
_SHORT = re.compile(r"\b(?:e\.g|i\.e|et al|vs|Fig|Eq|Sec|approx|cf|[A-Z])\.$")


def sentences(text: Text) -> Iterator[tuple[int, str]]:
    """Yield each sentence of a text with its line."""
    start = 0
    # Code is hidden, letter by letter, so that a point in it ends nothing.
    hidden = re.sub(r"(`+)(.+?)\1", lambda m: "`" * len(m[0]), text.text, flags=re.DOTALL)
    for end in [*_END.finditer(hidden), None]:
        stop = end.end() if end else len(hidden)
        if end and _SHORT.search(hidden[start : end.start() + 1]):
            continue
        part = text.text[start:stop]
        begins = start + len(part) - len(part.lstrip())
        if sentence := " ".join(part.split()):
            yield text.line + text.text.count("\n", 0, begins), sentence
        start = stop


# --- Pages


def texts_of_page(text: str) -> Iterator[Text]:
    """Yield the prose of a page in Markdown: no headings, tables, code, comments or targets."""
    text = re.sub(r"<!--.*?-->", _blank, text, flags=re.DOTALL)
    text = re.sub(r"^ *(```+|~~~+).*?^ *\1 *$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)
    text = re.sub(r"</?\w[^>`]*>|\*\*|^\[[^\]]+\]: .*$", "", text, flags=re.MULTILINE)
    start, lines, after_empty, in_list = 0, [], True, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        is_code = after_empty and re.match(r"    |\t", line) and not in_list and not lines
        ends = not line.strip() or re.match(r"\s*(\||#+ |---|===)", line) or is_code
        item = re.match(r"\s*(?:[-*+]|\d+[.)]) +", line)
        if lines and (ends or item):
            yield Text(start, "\n".join(lines), "page")
            lines = []
        after_empty = not line.strip() or bool(is_code)
        if line.strip() and not ends:
            in_list = bool(item) or (in_list and (bool(lines) or line[0] == " "))
            start = start if lines else number
            lines.append(line[item.end() :] if item else line.strip().lstrip("> "))


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


# --- Programs


def texts_of_program(text: str) -> Iterator[Text]:
    """Yield docstrings and the messages of errors and warnings."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body and (doc := ast.get_docstring(node, clean=False)):
                kind = "property" if _is_property(node) else "docstring"
                yield from texts_of_docstring(doc, node.body[0].lineno, kind)
        elif isinstance(node, ast.Call) and _says(node):
            for argument in node.args[:2]:
                if message := _message(argument):
                    yield Text(argument.lineno, message, "message")


def _is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(each).endswith("property") for each in decorators)


def _says(call: ast.Call) -> bool:
    """Whether a call makes an error or a warning."""
    name = ast.unparse(call.func).rpartition(".")[2]
    return bool(re.search(r"(Error|Warning|Exception|NeedsTuning|^warn|^exit)$", name))


def _message(node: ast.AST) -> str:
    """The text that an expression is, its values as a piece of code; empty if it is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_message(value) or "`x`" for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _message(node.left), _message(node.right)
        return (left or "`x`") + (right or "`x`") if left or right else ""
    return ""


def texts_of_docstring(doc: str, line: int, kind: str) -> Iterator[Text]:
    """Yield the paragraphs and entries of a docstring that begins in a line of its file."""
    lines = doc.expandtabs().splitlines()
    margin = min((_indent(each) for each in lines[1:] if each.strip()), default=0)
    lines = [lines[0], *(each[margin:] for each in lines[1:])]
    found: list[str] = []
    start = literal = 0  # literal: one more than the indent of the text that has a block of code
    example = False
    for number, each in enumerate(lines):
        if literal and each.strip():
            if _indent(each) >= literal:
                continue
            literal = 0
        example = bool(each.strip()) and (example or each.lstrip().startswith(">>> "))
        if found and (not each.strip() or example or _begins_entry(each, found[0])):
            yield from _as_text(found, line + start, kind)
            found = []
        if not each.strip() or example or _TITLE.fullmatch(each):
            continue
        start = start if found else number
        found.append(each)
        if each.rstrip().endswith("::"):
            yield from _as_text(found, line + start, kind)
            found, literal = [], _indent(each) + 1
    yield from _as_text(found, line + start, kind)


_TITLE = re.compile(r" *[A-Z]\w*(?: \w+)?: *")
_NAME = r"\*{0,2}[\w.]+"
_ENTRY = re.compile(rf" *(?:[-*] +|(?:``.+?``|{_NAME}(?:,\s+{_NAME})*): )")
_NAMES = re.compile(rf" *{_NAME}(?:, {_NAME})*,")  # the first line of many


def _begins_entry(line: str, first: str) -> bool:
    """Whether a line begins an entry of the list that ``first`` is an entry of."""
    begins = [_ENTRY.match(each) or _NAMES.fullmatch(each) for each in (line, first)]
    return all(begins) and _indent(line) == _indent(first)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _as_text(lines: list[str], line: int, kind: str) -> Iterator[Text]:
    """A paragraph without what is no prose: tables, references and the names of entries."""
    if not lines or re.match(r" *(?:(?:References?|Source|Paper): |={4})", lines[0]):
        return
    text = "\n".join(each.strip() for each in lines)
    if _indent(lines[0]) > 0 or re.match(r"[-*] ", text):
        text = re.sub(_ENTRY, "", text, count=1)
    yield Text(line, re.sub(r":(?:class|func|meth|mod|attr|data):`", "`", text), kind)


# --- Files


def files_of(paths: Iterable[str]) -> Iterator[Path]:
    """Yield the pages and programs that paths name, those of folders included."""
    for each in paths:
        path = ROOT / each
        if not path.exists():
            sys.exit(f"language: error: there is no {each}")
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        yield from (file for file in found if file.suffix in {".md", ".py"})


def findings_of(file: Path) -> list[Finding]:
    texts = texts_of_page if file.suffix == ".md" else texts_of_program
    name = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
    found = findings_in(texts(file.read_text()), name)
    return sorted(found, key=lambda finding: finding.line)


def all_findings() -> list[Finding]:
    """Return what ``make lint`` must not find."""
    found = [finding for file in files_of(CHECKED) for finding in findings_of(file)]
    rest = [finding for file in files_of(BEGINNINGS) for finding in findings_of(file)]
    return found + [finding for finding in rest if finding.rule.startswith("begins")]


def main() -> None:
    if given := [str(Path(each).resolve()) for each in sys.argv[1:]]:
        found = [finding for file in files_of(given) for finding in findings_of(file)]
    else:
        found = all_findings()
    for finding in found:
        print(finding)
    if found:
        sys.exit(f"language: error: {len(found)} sentences break a rule")


if __name__ == "__main__":
    main()
