"""The script of ``make sanitize``; not among the tests that it runs itself."""

from __future__ import annotations

import sys

import pytest

from tests import jobs


@pytest.mark.timeout(240)
def test_sanitizers_find_nothing_where_no_test_is_chosen():
    """Nor is anything built for that."""
    command = [
        sys.executable,
        str(jobs.ROOT / "scripts" / "sanitize.py"),
        "-k",
        "no_test_has_this_name",
    ]
    _, output = jobs.run(command, timeout=200)
    assert output.count("choose no test of these") == 2, output
