"""The commands of docs/commands.md run as they stand there, and say what they should.

A function named after a program checks what its commands print.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests import jobs

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG"
#: steps of an epoch: 1437 images, four ranks, batches of 16
STEPS = 1437 // 4 // 16


def systems() -> list[str]:
    """The commands of the table, of which there are many."""
    page = (ROOT / "docs" / "commands.md").read_text()
    found = re.findall(r"^\| .* \| `(.*)` \| \[", page, re.MULTILINE)
    assert len(found) >= 17
    return found


@pytest.mark.timeout(500)
@pytest.mark.parametrize("command", systems(), ids=lambda c: c.rpartition("mpi_examples.")[2][:60])
def test_the_command_that_shows_a_system(tmp_path, command):
    program, *arguments = command.split()
    if program == "python":
        program = jobs.python()
    # In a folder of its own: some write pictures.
    _, output = jobs.run(["env", "-C", str(tmp_path), program, *arguments], timeout=480)
    check = globals().get(re.search(r"^(?:python -m mpi_examples\.)?(\S+)", command)[1])
    if check is not None:
        check(command, output, tmp_path)
    else:
        assert re.search(r"\d", output), "it says what came out"
    pictures = [*tmp_path.rglob("*.png")]
    assert bool(pictures) == (".png" in output)
    for picture in pictures:
        assert picture.read_bytes().startswith(PNG)
        assert str(picture.resolve()) in output


def rows_of(output: str, end: str) -> dict[str, str]:
    """The rows of a table by their first words, if they end so."""
    return {line.split()[0]: line for line in output.splitlines() if line.endswith(end)}


def methods_of(command: str) -> list[str]:
    return re.search(r"--methods ([^-]*(?:$| ))", command)[1].split()


def allreduce_steps(command: str, output: str, folder: Path) -> None:
    assert output.startswith("$ ")
    for summary in ("6 rounds, 24 messages", "4 rounds, 16 messages"):
        assert f"{summary}; every rank sent 192 bytes, for a vector of 128" in output
    assert output.count("have the right sum") == 2


def train_digits_mpi(command: str, output: str, folder: Path) -> None:
    assert "same weights, bit for bit" in output
    rows = {name: line.split()[1:] for name, line in rows_of(output, " ms").items()}
    if "none" in rows:
        dgc = "dgc:density=0.01"
        assert min(float(rows[name][0]) for name in ("none", dgc)) > 92, output
        assert rows["none"][4] == "1.0x"
        assert float(rows[dgc][7].rstrip("x")) > 60


def biased_compression(command: str, output: str, folder: Path) -> None:
    if "descent" in command:
        descent(output)
        return
    rows = {line[:26].strip(): line[26:].split() for line in output.splitlines()}
    measured, expected = rows["top-k 10.0%"][1:], rows["top-k 10.0%, in theory"]
    np.testing.assert_allclose(np.array(measured[:3], float), np.array(expected, float), atol=0.04)


def descent(output: str) -> None:
    lines = [line.split() for line in output.splitlines() if re.search(r"\de-\d\d ", line)]
    rows = {" ".join(line[:-10]): line[-10:] for line in lines}
    assert len(rows) == 13
    # Bytes a step: a frame is a header of 16 bytes, indices, values, and padding to 8 bytes; packed
    # indices take 5 to 8 bits each.
    sent = {name: int(row[1].replace(",", "")) for name, row in rows.items()}
    assert sent["dense"] == 4 * 650
    assert 16 + 33 * (4 + 5 / 8) < sent["EF top-k"] < 16 + 33 * (4 + 1) + 16
    # A norm and 33 digits are 21 bytes.
    assert 16 + 21 + 33 * 5 / 8 < sent["EF top-k + dithering"] < 16 + 21 + 33 + 16
    assert sent["EF random-k"] == 33 * 4
    assert sent["random-k, own draws"] == 16 + 33 * 4 + 4
    order = "EF top-k + dithering", "EF top-k", "natural compression", "dense"
    to_a_hundredth = [float(rows[name][2]) for name in order]
    assert sorted(set(to_a_hundredth)) == to_a_hundredth


def all_systems(command: str, output: str, folder: Path) -> None:
    size = r"([\d.]+ \w*B)"
    row = rf"^(\S+)  .* {size} +{size} +([\d.]+x|-) +{size} +([\d.]+) +([\d.]+) %$"
    found = {name: rest for name, *rest in re.findall(row, output, re.MULTILINE)}
    assert [*found] == re.search(r"--systems (.*?) --", command)[1].split()
    ratio = {name: float(rest[2].rstrip("x")) for name, rest in found.items() if rest[2] != "-"}
    # So many steps between two exchanges, of whose leaders one in four sends; or no exchange.
    known = {"dense": 1, "local_sgd": 8, "easgd": 8, "diloco": 8, "leader_sgd": 32}
    known |= {"server": 2 / 3}
    assert {name: times for name, times in ratio.items() if name in known} == {
        name: pytest.approx(times, abs=0.06) for name, times in known.items() if name in ratio
    }
    assert all(ratio[name] > 1 for name in ratio.keys() - {"dense", "server"})
    assert ratio.get("diloco+dgc", 240) >= 240
    sent = {name: rest[0] for name, rest in found.items()}
    assert sent.get("alone", "0 B") == "0 B"
    if "codistilled_fp16" in sent:
        # 16 x 10 numbers of 2 bytes, in a frame of its own, to three ranks, not in the burn-in
        steps, frame = 32, 16 + 16 * 10 * 2
        assert sent["codistilled_fp16"] == f"{3 * frame * (steps - 10) / steps:.0f} B"
    assert all(float(rest[4]) < 8 for rest in found.values())
    if "server" in found:
        # Three workers send a gradient each; the server sends them as many bytes back.
        assert found["dense"][:4] == ["4.1 MiB", "4.1 MiB", "1.0x", "4.1 MiB"]
        assert found["server"][:4] == ["6.2 MiB", "12.3 MiB", "0.7x", "6.2 MiB"]
        page = (ROOT / "docs/systems.md").read_text()
        for name in ("dense", "server"):
            cells = rf"{sent[name]} \| {found[name][2]}"
            assert re.search(rf"^\| `{name}`.* \| {cells} \|$", page, re.MULTILINE)
        # The same images, weights and mean of gradients: rounding is all that differs.
        ends = np.array([found[name][4:] for name in ("dense", "server")], float)
        assert ends[0, 0] == pytest.approx(ends[1, 0], rel=0.03)
        assert ends[:, 1].min() > 30


def train_embeddings(command: str, output: str, folder: Path) -> None:
    rows = re.findall(r"^(\S+) +([\d.]+) +([\d.]+) KiB$", output, re.MULTILINE)
    assert [row[0] for row in rows] == ["whole", "float16", "int8", "top:0.1", "top:0.1:int8"]
    assert all(0 < float(loss) < 6 * np.log(2) for _, loss, _ in rows), "that of zeros"
    sent = {name: float(kib) for name, _, kib in rows}
    # Of a row 8 + 256 and 8 + 128 bytes, and messages of 24 bytes more.
    assert sent["whole"] / sent["float16"] == pytest.approx(264 / 136, abs=0.06)
    assert sent["whole"] / sent["top:0.1"] == pytest.approx(10, rel=0.03)
    assert sent["top:0.1"] > 3 * sent["top:0.1:int8"]


def simulations(command: str, output: str, folder: Path) -> None:
    (exact_diffusion if "exact_diffusion" in command else prox_lead)(output)


def exact_diffusion(output: str) -> None:
    rows = [line.split() for line in output.splitlines() if re.match(r"\S+ +[01]\.\d{4} ", line)]
    assert len(rows) == 12
    for row in rows:
        for at in (3, 7):
            closed, mean, _, interval = row[at : at + 4]
            # One in twenty intervals of 95 % is too narrow; 3.5 standard errors are enough.
            assert abs(float(mean) - float(closed)) < 3.5 / 1.96 * float(interval)
    ratio = {(row[0], float(row[2])): float(row[-1]) for row in rows}
    assert ratio["line", 10] > 10, "bias is what counts"
    assert ratio["line", 0.001] < 1, "noise is"
    assert ratio["complete", 10] < 1


def prox_lead(output: str) -> None:
    """Two bits cost no step, batches stay in a ball, and estimators leave it."""
    rows = re.findall(r"^(\S.*?)  +[\d.e-]+ +[\d.e-]+ +([\d.e-]+) +([\d,]+)$", output, re.MULTILINE)
    error = {name: float(last) for name, last, _ in rows if name != "method"}
    sent = {name: int(count.replace(",", "")) for name, *_, count in rows if name != "method"}
    assert len(error) == 5, output
    assert error["Prox-LEAD"] == pytest.approx(error["P2D2"], rel=0.5)
    assert error["Prox-LEAD, LSVRG"] == pytest.approx(error["P2D2"], rel=0.5)
    assert error["Prox-LEAD, batches"] > 5 * error["P2D2"]
    assert sent["P2D2"] > 20 * sent["Prox-LEAD"]


def train_decentralized(command: str, output: str, folder: Path) -> None:
    rows = rows_of(output, " ms")
    assert [*rows] == methods_of(command)
    found = {
        name: re.search(r"([\d.e+-]+) +\S+ \S+ +\S+ \S+ +([\d.]+)x ", row)
        for name, row in rows.items()
    }
    distance, ratio = ({name: float(each[i]) for name, each in found.items()} for i in (1, 2))
    assert (distance.pop("dense"), ratio["dense"]) == (0, 1)
    assert all(0 < each < 0.5 for each in distance.values())
    # On a line of four, ranks have one and a half neighbours.
    assert ratio["diffusion"] == ratio["exact_diffusion"] == pytest.approx(1.5, abs=0.02)
    assert ratio["gradient_tracking"] == pytest.approx(3, abs=0.02)
    assert ratio["lead"] < 0.15


def train_parameter_server(command: str, output: str, folder: Path) -> None:
    rows = {line[:20].strip(): line[20:] for line in output.splitlines() if " % " in line}
    assert len(rows) == 7
    assert rows["sync"].split()[-5:-2] == ["0", "of", str(4 * STEPS)]
    assert int(rows["sync, 1 backup"].split()[-5]) > 0, "the slow one was dropped"
    assert re.findall(r"[\d.]+ KiB", rows["sync"]) == ["75.2 KiB", "75.1 KiB"], "up in frames"
    assert re.findall(r"[\d.]+ KiB", rows["sync, top-k"]) == ["4.6 KiB", "75.1 KiB"]


def train_large_batch(command: str, output: str, folder: Path) -> None:
    rows = {
        line.split()[0]: re.search(r" ([\d.]+) % +([\d.]+) +(\d+) +([\d.]+) [KM]iB$", line)
        for line in output.splitlines()
        if line.endswith("iB")
    }
    assert list(rows) == ["small", "large", "linear", "warmup", "lars", "lamb", "sam"]
    # 1437 examples; SAM sends no more than SGD.
    assert {name: int(row[3]) for name, row in rows.items()} == {
        **dict.fromkeys(rows, 2 * (1437 // 256)),
        "small": 2 * (1437 // 32),
    }
    assert rows["sam"][4] == rows["large"][4] == f"{10 * 2 * 26122 / 1024:.1f}"
    assert float(rows["small"][1]) > float(rows["large"][1]), "a few steps at the same rate"


def generalization(command: str, output: str, folder: Path) -> None:
    assert output.startswith("$ ")
    rows = [line for line in output.splitlines() if line.startswith("1/sigma' pacbayes-mag ")]
    assert [len(row.split()[2:]) for row in rows] == [9, 10]
    # Hyper-parameters of one value have no psi.
    assert rows[0].split()[3:8] == ["-", "-", "-", "-", "-"]
