"""Pages, docstrings and messages obey the rules that ``scripts/language.py`` can hold."""

from __future__ import annotations

import textwrap

import pytest

from tests.docs.test_site import script

language = script("language")

BROKEN = {
    "begins": [
        "What was sent is gone.",
        "Of ten rows one is sent.",
        "Where ranks differ, all raise.",
        "Whose it is, nobody knows.",
        "Else it is lost.",
        "*What is counted* is a call.",
    ],
    "per": [
        "It takes 3 ms a step.",
        "4 bits an element are sent.",
        "40 MB a rank.",
        "1 % a round.",
    ],
    "instead of": [
        "It is used in the place of g.",
        "A list in place of a tuple.",
        "m in its place.",
    ],
    "Never:": ["Never: several GPUs."],
    "behind": ["The header is behind the bytes.", "It is two points behind DGC."],
    "again": ["It begins anew."],
    "option=": ["Clip by `clip_norm=`."],
    "this many": ["After so many steps it stops."],
    "words": ["word " * 26 + "ends."],
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_sentence_that_breaks_a_rule_is_found(rule):
    for sentence in BROKEN[rule]:
        assert [each for each in language.broken_rules(sentence, "page") if rule in each], sentence


@pytest.mark.parametrize(
    "sentence",
    [
        "What is sent?",
        "This is a step, and a rank takes it.",
        "The sums are written in place.",
        "The rate lags behind by one step.",
        "A tensor is divided by a number of ranks.",
        "It is set by `DGC(clip_norm=1)`.",
        "So many are called.",
        "`" + "word " * 30 + "` is one word.",
        "word " * 24 + "ends.",
    ],
)
def test_a_sentence_that_breaks_none_passes(sentence):
    assert not list(language.broken_rules(sentence, "page"))


def test_a_property_begins_with_a_noun():
    assert list(language.broken_rules("Return the seed.", "property"))
    assert not list(language.broken_rules("The seed shared by all ranks.", "property"))
    assert not list(language.broken_rules("Return the seed.", "docstring"))
    assert not list(language.broken_rules("It is a number.", "property", first=False))


def found(texts):
    return [sentence for text in texts for sentence in language.sentences(text)]


def test_the_prose_of_a_page():
    page = textwrap.dedent("""\
        # What is no sentence

        <!-- What is
        hidden. -->
        One sentence goes on
        in a second line. `x.y`, e.g. this [link
        text](what.md#of), is another!

        | What | stands in a table |
        |---|---|

        ```python
        # What is code.
        ```

            What is indented. So is this.

        - A first entry
          of two lines.
        - A second. With two sentences.

          It goes on.
        """)
    assert found(language.texts_of_page(page)) == [
        (5, "One sentence goes on in a second line."),
        (6, "`x.y`, e.g. this link text, is another!"),
        (18, "A first entry of two lines."),
        (20, "A second."),
        (20, "With two sentences."),
        (22, "It goes on."),
    ]


PROGRAM = '''\
"""The module."""

def f(x):
    """Return a sum::

        What is code.

    Args:
        x, y: a number, or
            ``None``.
        z: another.

    Reference: Of, What and Who.

    - One. Two.

    >>> f(1)
    What is printed.
    """
    text = "What is no message."
    raise ValueError(f"{x} is wrong: " + "write 1; got {x}")

class C:
    @property
    def p(self):
        """Whether it is."""
'''


def test_docstrings_and_messages_of_a_program():
    texts = list(language.texts_of_program(PROGRAM))
    assert sorted(found(texts)) == [
        (1, "The module."),
        (4, "Return a sum::"),
        (9, "a number, or ``None``."),
        (11, "another."),
        (15, "One."),
        (15, "Two."),
        (21, "`x` is wrong: write 1; got {x}"),
        (26, "Whether it is."),
    ]
    assert {text.kind for text in texts if text.line > 20} == {"message", "property"}


def test_findings_name_file_line_and_rule(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Good.\n\nWhat is it that is not good.\n")
    [finding] = language.findings_of(page)
    assert str(finding).startswith(f"{page}:3: begins with Of, What")


def test_every_exception_is_needed():
    """And says why it is one."""
    texts = "\n".join(
        " ".join(file.read_text().split()) for file in language.files_of(language.CHECKED)
    )
    assert all(part in texts and why for part, why in language.EXCEPTIONS.items())


def test_all_that_is_said_to_obey_does():
    assert not language.all_findings()
