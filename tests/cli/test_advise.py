"""``hvd-compress advise``."""

import dataclasses
import json
import os
import sys

import pytest

from hvd_compress.advisor import CANDIDATES, kept, loss_of
from hvd_compress.cli.main import main
from tests import jobs


def test_a_table_and_what_to_write(capsys):
    command = ["advise", "--model", "resnet50", "--ranks", "16", "--bandwidth", "1gbit"]
    assert main([*command, "--optimizer", "adamw", "--steps", "1000"]) == 0
    text = capsys.readouterr().out
    assert "1 Gbit/s, rounds of 50 us, 100 ms of backward, 1,000 steps of adamw" in text
    assert "Is the network your bottleneck? Yes" in text
    assert 'Write compression="linear"' in text
    head, _, rest = text.partition("These lose more than is tolerated:\n")
    more, _, unknown = rest.partition("Nobody has measured what these lose:\n")
    allowed, more, unknown = (
        {line.split()[0]: line for line in part.partition("\n\n")[0].splitlines()}
        for part in (head.rpartition("---\n")[2], more, unknown)
    )
    assert next(iter(allowed)) == "linear"
    assert {"none", "fp16"} < allowed.keys()
    assert {"onebit", "topk:density=0.01", "powersgd:rank=4"} <= more.keys()
    assert {"dgc:density=0.001,", "qsgd"} <= unknown.keys()
    loss = loss_of("topk:density=0.01", "adamw", 1000)
    assert " ".join(more["topk:density=0.01"].split()).endswith(
        f"{loss} bytes, 1,200 steps, 1 seed"
    )
    assert unknown["qsgd"].split()[-2:] == ["-", "-"]


def test_what_to_write_depends_on_the_optimizer_and_on_what_is_tolerated(capsys):
    def written(*options):
        main(["advise", "--json", *options])
        return json.loads(capsys.readouterr().out)["write"]

    assert written("--optimizer", "sgd") == 'compression="powersgd:rank=2"'
    assert written("--optimizer", "adamw") == 'compression="linear"'
    assert written("--optimizer", "adamw", "--tolerance", "20") == 'compression="powersgd:rank=4"'


def test_no_comes_first_where_the_network_is_fast(capsys):
    main(["advise", "--bandwidth", "100 Gbit/s", "--backward", "1s"])
    text = capsys.readouterr().out
    assert "Is the network your bottleneck? No" in text
    assert 'Write compression="fp16"' in text


def test_json(capsys):
    main(["advise", "--ranks", "8", "--hosts", "2", "--bandwidth", "100mbit", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["bandwidth"] == 1e8
    assert (found["ranks"], found["hosts"], found["bottleneck"]) == (8, 2, True)
    seconds = [row["seconds"] for row in found["rows"]]
    assert seconds == sorted(seconds)
    assert found["best"] == "fp16"  # in whose sums a host sends once for all its ranks


def test_json_has_no_infinity(capsys, monkeypatch):
    def refuse(name):
        raise ValueError(name)

    pieces = kept("resnet50")
    pieces["linear"] = dataclasses.replace(pieces["linear"], before=0.0, after=0.0, each=0.0)
    monkeypatch.setattr("hvd_compress.cli.advise.kept", lambda model: pieces)
    main(["advise", "--json"])
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert "always" in {row["break_even"] for row in found["rows"]}


def test_one_rank_without_backward(capsys):
    assert main(["advise", "--ranks", "1", "--backward", "0s"]) == 0
    text = capsys.readouterr().out
    assert "bottleneck? No" in text
    assert text.count(" 1.00x ") == len(CANDIDATES)


MODULE = """
import torch
def net():
    return torch.nn.Linear(50, 20)
def shapes():
    return {"w": (50, 20), "b": (20,)}
def nothing():
    return 7
def frozen():
    return torch.nn.Linear(2, 2).requires_grad_(False)
def number():
    return {"w": 5}
def negative():
    return {"w": (5, -1)}
def fraction():
    return {"w": (5.5, 2)}
def text():
    return {"w": "512"}
def lazy():
    return torch.nn.LazyLinear(5)
def broken():
    return [].no_list_has_this
no_function = 5
"""


def test_a_model_of_ones_own(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    for function in ("net", "shapes"):
        assert main(["advise", "--model", f"own_models:{function}", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["rows"]
        assert {("fp16", 2040), ("none", 4080)} < {(row["method"], row["bytes"]) for row in rows}
    for wrong, named in (("nothing", "torch.nn.Module"), ("nix", "nix"), ("", "module:function")):
        assert main(["advise", "--model", f"own_models:{wrong}"]) == 2
        assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("frozen", "trained"),
        *((name, "whole numbers") for name in ("number", "negative", "fraction", "text", "lazy")),
        ("no_function", "no_function is no function"),
    ],
)
def test_a_model_that_has_no_shapes(function, named, tmp_path, monkeypatch, capsys):
    (tmp_path / "own_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    assert main(["advise", "--model", f"own_models:{function}"]) == 2
    assert named in capsys.readouterr().err


def test_errors_of_a_model_are_its_own(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttributeError, match="no_list_has_this"):
        main(["advise", "--model", "own_models:broken"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--bandwidth", "3"], "1gbit"),
        (["--bandwidth", "0gbit"], "1gbit"),
        (["--bandwidth", "1.2.3gbit"], "1gbit"),
        (["--latency", "fast"], "50us"),
        (["--backward", "..ms"], "100ms"),
    ],
)
def test_what_is_no_quantity(options, named, capsys):
    with pytest.raises(SystemExit):
        main(["advise", *options])
    assert named in capsys.readouterr().err


def test_other_errors(capsys):
    assert main(["advise", "--ranks", "4", "--hosts", "3"]) == 2
    assert "hosts=3" in capsys.readouterr().err
    assert main(["advise", "--model", "resnet51"]) == 2
    assert "mobilenet_v2" in capsys.readouterr().err


def test_measured_where_it_runs(tmp_path):
    (tmp_path / "own_models.py").write_text(MODULE)
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
    command += ["-m", "hvd_compress", "advise", "--measure", "--json"]
    path = f"{tmp_path}{os.pathsep}{jobs.ROOT}"
    _, text = jobs.run([*command, "--model", "own_models:shapes"], 120, PYTHONPATH=path)
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert (found["ranks"], found["hosts"]) == (2, 1)
    assert found["inner_bandwidth"] > 1e6


def test_one_rank_has_no_network_to_measure(capsys):
    assert main(["advise", "--measure"]) == 2
    assert "mpirun" in capsys.readouterr().err
