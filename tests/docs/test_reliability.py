"""The page of reliability says what is in the results of the campaigns."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOUND = json.loads((ROOT / "benchmarks/reliability/results.json").read_text())
PAGE = (ROOT / "docs/reliability.md").read_text()
TEXT = " ".join(PAGE.split())


def rows(header: str) -> list[str]:
    """The rows of the table that begins so."""
    lines = PAGE[PAGE.index(f"\n{header}") :].split("\n\n")[0].strip().splitlines()
    return lines[2:]


def test_damaged_frames():
    figures = ("cases", "payload_error", "in_range", "unchanged", "wrong")
    expected = [
        f"| {row['frames']} | {' | '.join(f'{row[figure]:,}' for figure in figures)} |"
        for row in FOUND["frames"]
    ]
    total = " | ".join(f"{sum(row[figure] for row in FOUND['frames']):,}" for figure in figures)
    assert rows("| frames |") == [*expected, f"| all | {total} |"]
    found = FOUND["exchanges"]
    assert (
        f"{found['cases']:,} cases: {found['payload_error']:,} `PayloadError`, "
        f"{found['unchanged']} in which no byte was changed, {found['unread']} in which nobody "
        "read the damaged message."
    ) in TEXT


def test_ranks_that_are_killed_stopped_or_late():
    expected = []
    for accident in dict.fromkeys(row["accident"] for row in FOUND["kills"]):
        own = [row for row in FOUND["kills"] if row["accident"] == accident]
        jobs = [f"`{row['job']}` {sum(row['outcomes'].values())}" for row in own]
        outcomes: dict[str, int] = {}
        for row in own:
            for outcome, count in row["outcomes"].items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        said = [f"{count} x {outcome}" for outcome, count in outcomes.items()]
        text = "; ".join(said) if len(said) > 1 else next(iter(outcomes))
        longest = max(row["longest"] for row in own)
        expected.append(f"| {accident} | {', '.join(jobs)} | {text} | {longest} s |")
    assert rows("| what happens |") == expected
    assert f"{sum(sum(row['outcomes'].values()) for row in FOUND['kills'])} runs:" in TEXT


def test_systems_that_train_for_long():
    own = FOUND["soak"]
    steps = [row["steps"] for row in own]
    assert (
        f"The results have {len(own)} systems with {min(steps):,} to {max(steps):,} steps each."
    ) in TEXT
    assert f"ended between 0 and {max(row['last_loss'] for row in own)}" in TEXT
    assert f"grew by at most {max(row['grows_mib'] for row in own)} MiB" in TEXT
    assert all(row["last_loss"] < row["first_loss"] for row in own)


def test_memory():
    steps = max(row["grows_kib"] for row in FOUND["memory"])
    made = max(row["optimizers_grow_kib"] for row in FOUND["memory"])
    assert {(row["steps"], row["optimizers"]) for row in FOUND["memory"]} == {(10_000, 1_000)}
    assert (
        f"In 10,000 steps the nine methods grew by at most {steps} KiB, and over 1,000 optimizers "
        f"by at most {made} KiB"
    ) in TEXT
