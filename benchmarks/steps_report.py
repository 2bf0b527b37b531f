"""The measurements of ``steps.py``: rows in a file, tables and a picture."""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

#: these lines of a page, with its tables between them
WRITTEN = re.compile(r"(<!-- (\w+), by benchmarks/steps.py -->\n).*?(<!-- end -->)", re.DOTALL)
#: the network on which the page compares models and times of backward
NETWORK = "4x1gbit"


@dataclasses.dataclass(frozen=True)
class Row:
    """One row on one network.

    Attributes:
        backward: in milliseconds.
        seconds: of each sample, up to the last average.
        step: seconds of the optimizer's step that follows, the median.
        sent: bytes that a rank handed over in a step, if known; ``received`` those that it got.
        dense: bytes of the gradient in float32.
        rate: bytes a second that each rank receives when all send at once, if measured.
    """

    network: str
    framework: str
    model: str
    backward: float
    name: str
    seconds: list[float]
    step: float
    sent: float | None
    received: float | None
    dense: float
    rate: float | None
    ranks: int

    @property
    def cell(self) -> tuple[str, str, str, float]:
        return self.network, self.framework, self.model, self.backward

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def read(file: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(file.read_text())]


def kept(rows: Sequence[Row], file: Path) -> None:
    """Write rows in the place of all of their cells: what is compared is of one run."""
    new = {row.cell for row in rows}
    old = read(file) if file.exists() else []
    known = [dataclasses.asdict(row) for row in [*(r for r in old if r.cell not in new), *rows]]
    rounded = json.loads(json.dumps(known), parse_float=lambda x: float(f"{float(x):.6g}"))
    file.write_text("[\n" + ",\n".join(map(json.dumps, rounded)) + "\n]\n")


def cells(rows: Sequence[Row]) -> dict[tuple[str, str, str, float], dict[str, Row]]:
    """Rows by name, by cell."""
    found: dict[tuple[str, str, str, float], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row.cell, {})[row.name] = row
    return found


def beyond(row: Row, own: dict[str, Row]) -> tuple[float, float | None]:
    """Return the seconds beyond backward of a row in its cell, and their floor if it is known.

    An allreduce, whose bytes sent and received are equal, moves two arrays but for a share.
    """
    seconds = row.median - (own["backward"].median if "backward" in own else 0.0)
    if "stream" not in own or row.sent is None or row.rate is None:
        return seconds, None
    arrives = row.sent if row.received is None else row.received
    if row.sent >= row.dense / 2 or arrives <= 1.01 * row.sent:
        arrives = row.sent * (row.ranks - 1) * 2 / row.ranks
    stream = own["stream"].median if row.sent < row.dense / 2 else 0.0
    return seconds, arrives / row.rate + stream


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """All that is known, a table a cell."""
    for (network, framework, model, backward), own in cells(rows).items():
        first = next(iter(own.values()))
        yield f"{model}, {network}, {first.ranks} ranks, {framework}, {backward:g} ms of backward"
        if first.rate is not None:
            yield f"the line: {first.rate / 1e6:,.0f} MB/s to each rank, all at once"
        columns = ("median", "min", "max", "sent", "ratio", "beyond", "floor", "times", "step")
        yield f"{'':26}" + "".join(f"{column:>11}" for column in columns)
        for name, row in own.items():
            texts = [ms(row.median), ms(min(row.seconds)), ms(max(row.seconds)), "", ""]
            if row.sent:
                texts[3:] = f"{row.sent / 1000:,.1f} kB", f"{row.dense / row.sent:.1f}x"
            if name not in ("backward", "stream"):
                seconds, floor = beyond(row, own)
                texts.append(ms(seconds))
                texts += [ms(floor), f"{seconds / floor:.1f}x"] if floor else ["", ""]
                texts.append(ms(row.step))
            yield f"{name:26}" + "".join(f"{text:>11}" for text in texts)
        yield ""


def ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"


_NAMES = {"shm": "shared memory", "2x10gbit": "2 hosts, 2.1 Gbit/s"}


def spoken(network: str) -> str:
    """The name of a network in words: of a line that two cores cannot fill, by what arrived."""
    hosts, _, rate = network.partition("x")
    if not rate or network in _NAMES:
        return _NAMES.get(network, network)
    return f"{hosts} hosts, {rate.replace('gbit', ' Gbit/s').replace('mbit', ' Mbit/s')}"


def hidden(backward: float) -> str:
    """The backward of a cell in words."""
    return f"{backward:g} ms of backward" if backward else "one product per tensor as backward"


Columns = dict[str, dict[str, Row]]


def over_networks(rows: Sequence[Row]) -> Columns:
    """The cells of the first model, with one product per tensor as backward."""
    first = rows[0].model, 0.0
    return {spoken(cell[0]): own for cell, own in cells(rows).items() if cell[2:] == first}


def over_models(rows: Sequence[Row]) -> Columns:
    """The other cells of one network: models, and times of backward."""
    return {
        f"{model}, {hidden(backward)}" if backward else model: own
        for (network, _, model, backward), own in cells(rows).items()
        if network == NETWORK and (model, backward) != (rows[0].model, 0.0)
    }


def table(columns: Columns, entry: Callable[[str, dict[str, Row]], str]) -> str:
    text = [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    for name in dict.fromkeys(name for own in columns.values() for name in own):
        entries = [entry(name, own) if name in own else "" for own in columns.values()]
        if any(entries):
            text.append(f"| {name} | {' | '.join(entries)} |")
    return "\n".join(text)


def median(name: str, own: dict[str, Row]) -> str:
    """Milliseconds, with a star where there is one sample only."""
    if name == "stream":
        return ""
    once = "\\*" if len(own[name].seconds) == 1 else ""
    return f"{1000 * own[name].median:,.0f}{once}"


def multiple(name: str, own: dict[str, Row]) -> str:
    """The time beyond backward as a multiple of its floor."""
    seconds, floor = beyond(own[name], own)
    return f"{seconds / floor:.1f}" if floor else ""


def medians(rows: Sequence[Row]) -> str:
    """Milliseconds of the first model on all networks, then of all else on one network."""
    found = [table(columns, median) for columns in (over_networks(rows), over_models(rows))]
    return f"{found[0]}\n\nOther models and times of backward, {spoken(NETWORK)}:\n\n{found[1]}"


def floors(rows: Sequence[Row]) -> str:
    """Multiples of the floor, and the rates by which it was reckoned."""
    columns = over_networks(rows)
    rates = [next(iter(own.values())).rate or 0.0 for own in columns.values()]
    arrives = " | ".join(f"{8 * rate / 1e9:.2g}" for rate in rates)
    return f"{table(columns, multiple)}\n| Gbit/s that arrive at each rank | {arrives} |"


def in_page(page: str, rows: Sequence[Row]) -> str:
    """Return the page with its tables as these rows make them."""
    written = {"medians": medians, "floors": floors}
    if not WRITTEN.search(page):
        raise ValueError(f"the page has no place for tables: {WRITTEN.pattern}")
    return WRITTEN.sub(lambda at: f"{at[1]}\n{written[at[2]](rows)}\n\n{at[3]}", page)


def drawn(rows: Sequence[Row], picture: Path) -> None:
    """A panel for each cell, a bar for each row, in the order of their length."""
    import matplotlib.pyplot as plt

    panels = cells(rows)
    columns = min(len(panels), 3)
    height = max(map(len, panels.values()))
    size = (5.5 * columns, (0.7 + 0.24 * height) * -(-len(panels) // columns))
    figure, grid = plt.subplots(
        -(-len(panels) // columns), columns, figsize=size, layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, ((network, _, model, backward), own) in zip(grid.flat, panels.items(), strict=False):
        names = sorted(own.keys() - {"backward", "stream"}, key=lambda n: -own[n].median)
        medians = [1000 * own[name].median for name in names]
        others = ("Horovod", "DDP fp", "DDP bf", "DDP powersgd", "powersgd p", "plain", "original")
        colors = ["#b0b0b0" if name.startswith(others) else "#2a6f97" for name in names]
        bars = axes.barh(names, medians, color=colors)
        axes.bar_label(bars, [f"{value:,.0f} ms" for value in medians], padding=3, fontsize=8)
        axes.set_xlim(0, 1.2 * max(medians, default=1.0))
        axes.spines[["top", "right"]].set_visible(False)
        title = f"{model}, {spoken(network)}, {hidden(backward)}"
        axes.set_title(title, loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
    figure.savefig(picture, dpi=110)


#: bars of a picture for readers in a hurry: rows, what they are called, and their rows of
#: ``quality.py``, by which accuracy is known; PyTorch's hook rounds as our ``fp16`` does
BARS = {
    "DDP fp16": ("PyTorch's fp16 hook", "fp16"),
    "linear": ("linear, 8 bits", "linear"),
    "topk:density=0.01": ("top-k 1 %", "topk:density=0.01"),
    "powersgd:rank=2": ("PowerSGD, rank 2", "powersgd:rank=2"),
    "dgc:density=0.001": ("DGC 0.1 %", "dgc:density=0.001, warm-up"),
}


def accuracy_on_mnist() -> dict[str, float]:
    """The mean of each method in the table of MNIST, which ``quality.py`` writes."""
    page = (Path(__file__).parents[1] / "docs/accuracy.md").read_text()
    rows = re.findall(
        r"^\| `(.*)` \| ([\d.]+) % \|", page[page.index("| mnist, 1x |") :], re.MULTILINE
    )
    return {method: float(accuracy) for method, accuracy in rows}


def said_of_bars(own: Mapping[str, Row], accuracy: Mapping[str, float]) -> list[str]:
    """The time of each of ``BARS``, and the accuracy of its method on MNIST."""
    return [
        f"{1000 * own[name].median:,.0f} ms, {accuracy[method]:.2f} %"
        for name, (_, method) in BARS.items()
    ]


def drawn_with_accuracy(rows: Sequence[Row], accuracy: Mapping[str, float], picture: Path) -> None:
    """Draw one cell: a bar for each of ``BARS``, its time and its accuracy on MNIST beside it."""
    import matplotlib.pyplot as plt

    [((network, _, model, backward), own)] = cells(rows).items()
    figure, axes = plt.subplots(figsize=(6.5, 2.3), layout="constrained")
    names = [*BARS][::-1]
    medians = [1000 * own[name].median for name in names]
    colors = ["#b0b0b0" if name.startswith("DDP") else "#2a6f97" for name in names]
    bars = axes.barh([BARS[name][0] for name in names], medians, color=colors)
    said = said_of_bars(own, accuracy)
    axes.bar_label(bars, said[::-1], padding=3, fontsize=8)
    axes.set_xlim(0, 1.3 * max(medians))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{model}, {spoken(network)}, {hidden(backward)}", loc="left", fontsize=9)
    axes.tick_params(labelsize=8)
    # By its title a test knows what the picture says.
    figure.savefig(picture, dpi=110, metadata={"Title": "; ".join(said)})
