"""The examples and benchmarks run, by themselves and under a starter, and say what they should."""

from __future__ import annotations

import functools
import gzip
import json
import re
from argparse import ArgumentTypeError
from pathlib import Path

import numpy as np
import pytest

from hvd_compress import method_names
from hvd_compress.config import lookup
from tests import jobs

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "mpi_examples"
full = pytest.mark.full
PNG = b"\x89PNG"


def program(example: str) -> list[str]:
    framework = "tensorflow" if "keras" in example else "torch"
    return [jobs.python(framework), "-m", f"mpi_examples.{example}"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "example", ["train_digits", pytest.param("train_digits_keras", marks=full)]
)
def test_digits(tmp_path, example):
    picture = tmp_path / "digits.png"
    options = ["--ranks", "2", "--epochs", "2", "--seeds", "1", "--warmup-epochs", "1"]
    options += ["--batch-size", "64"]
    options += ["--compression", "none", "dgc:values=float16", "topk", "randomk", "bf16"]
    command = [*program(example), *options]
    _, output = jobs.run([*command, "--output", str(picture)], timeout=380)
    assert picture.read_bytes().startswith(PNG)
    assert str(picture.resolve()) in output
    rows = {line.split()[0]: line for line in output.splitlines() if line.endswith(" ms")}
    assert {"none", "dgc:values=float16", "topk", "randomk", "bf16"} <= rows.keys()
    assert "1.0x" in rows["none"]
    assert "2.0x" in rows["bf16"]
    assert "4.0x" in rows["randomk"]
    assert "The warm-up was not over" not in output


def fake_penn_treebank(folder: Path) -> Path:
    """Penn Treebank's files, with a few sentences in them."""
    for name, sentences in (("train", 400), ("valid", 40), ("test", 40)):
        text = " the cat sat on the mat \n a dog saw the <unk> \n" * sentences
        (folder / f"ptb.{name}.txt").write_text(text)
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "launcher"),
    [("lstm", "alone"), ("transformer", "mpirun"), pytest.param("lstm", "gloo", marks=full)],
)
def test_text(tmp_path, request, model, launcher):
    picture = tmp_path / "text.png"
    data = fake_penn_treebank(tmp_path)
    options = ["--ranks", "2", "--epochs", "2", "--model", model, "--data", str(data)]
    options += ["--width", "16", "--batch-size", "2", "--lr", "4", "--density", "0.1"]
    options += ["--output", str(picture)]
    methods = ["none", "dgc:small=sparse"]
    if request.config.getoption("--full"):
        methods += ["topk", "onebit_adam"]
    options += ["--compression", *methods]
    output = start("train_text", *options, launcher=launcher, ranks=2, timeout=280)
    assert f"{model} on Penn Treebank, 2 ranks, 2 epochs" in output
    assert picture.read_bytes().startswith(PNG)
    row = r"^(?:.*>:)?(\S+) +([\d.]+) +[\d.]+ \w+ +([\d.]+)x +[\d.]+ \w+ +([\d.]+)x +[\d.]+ ms$"
    rows = {name: [*map(float, rest)] for name, *rest in re.findall(row, output, re.MULTILINE)}
    assert [*rows] == methods
    assert rows["none"][1:] == [1, 1]
    assert rows["dgc:small=sparse"][2] > 3
    # There are 10 words, and which follows is all but known.
    for method in ("none", "dgc:small=sparse"):
        assert 1 < rows[method][0] < 5, output


@full
@pytest.mark.timeout(300)
def test_every_method_trains(tmp_path):
    picture = tmp_path / "all.png"
    command = [*program("train_digits"), "--compression", "all"]
    command += ["--ranks", "2", "--epochs", "1", "--seeds", "1", "--output", str(picture)]
    _, output = jobs.run(command, timeout=280)
    assert picture.read_bytes().startswith(PNG)
    rows = {line.split()[0].split(":")[0] for line in output.splitlines() if line.endswith(" ms")}
    # Other tests register methods of their own.
    ours = [n for n in method_names() if lookup("method", n).__module__.startswith("hvd_compress.")]
    assert rows == set(ours)


SCRIPTS = [
    script
    for folder in (EXAMPLES, ROOT / "benchmarks")
    for script in sorted(folder.glob("*.py"))
    if re.search("^options = |parse_args", script.read_text(), re.MULTILINE)
    and script.stem != "demo"
]


@pytest.fixture(scope="module")
def said():
    """``said(commands)``: a status, what was printed and whether MPI was started, by command."""

    @functools.cache
    def run(commands: tuple[tuple[str, ...], ...]) -> dict[tuple[str, ...], tuple[int, str, bool]]:
        command = [jobs.python(), "-m", "tests.command_lines", json.dumps(commands)]
        # In an MPI that cannot start, one that is started ends the process.
        _, output = jobs.run(command, timeout=120, check=False, OPAL_PREFIX="/nowhere")
        lines = [line for line in output.splitlines() if line.startswith("[")]
        ended = (-1, f"it, or one before it, is no program that ends by itself: {output}", True)
        outcomes = [tuple(json.loads(line)) for line in lines]
        outcomes += [ended] * (len(commands) - len(outcomes))
        return dict(zip(commands, outcomes, strict=True))

    return run


HELP = {
    script.stem: (
        f"mpi_examples.{script.stem}" if script.parent == EXAMPLES else str(script),
        "--help",
    )
    for script in SCRIPTS
}


@pytest.mark.parametrize("script", [pytest.param(name, id=f"help@{name}") for name in HELP])
def test_help_starts_neither_ranks_nor_mpi(said, script):
    status, output, started_mpi = said(tuple(HELP.values()))[HELP[script]]
    assert output.startswith(f"usage: {script}.py")
    assert (status, started_mpi) == (0, False)


REFUSED = [
    ("train_digits", "--compression", "dcg", "method must be one of"),
    ("train_digits_keras", "--over", "vgg", "invalid choice"),
    ("train_digits", "--epochs", "0", "--epochs: must be a whole number, at least 1"),
    ("train_digits_mpi", "--compression", "dcg", "method must be one of"),
    ("train_digits_mpi", "--density", "7", "density must be"),
    ("train_text", "--data", "/no/such/folder", "/no/such/folder has no ptb.train.txt"),
    ("accuracy", "--seeds", "1", "--seeds must be 2 or more"),
    ("train_digits_mpi", "--framework", "tensorflow", "invalid choice"),
    ("allreduce_steps", "--algorithms", "rong", "invalid choice"),
    ("allreduce_steps", "--ranks", "0", "--ranks: must be a whole number, at least 1"),
    ("biased_compression", "--rates", "-1", "--rates: must be more than 0"),
    ("train_decentralized", "--topology", "exponential", "undirected"),
    ("train_decentralized", "--lr", "0", "--lr: must be more than 0"),
    ("all_systems", "--steps", "8", "--steps must be a multiple of 16"),
    ("train_parameter_server", "--straggler", "-1", "--straggler must be 0 or more"),
    ("train_large_batch", "--large", "8", "--large must be more than --small"),
    ("train_large_batch", "--compression", "dcg", "method must be one of"),
    ("generalization", "--examples", "5", "--examples must be 100 to 1400"),
]


#: programs that draw, and the option that says where to
DRAW = {
    script.stem: found[1]
    for script in sorted(EXAMPLES.glob("*.py"))
    if (found := re.search(r'"(--\w+)",\s+type=picture_file', script.read_text()))
    and script.stem != "demo"
}
DRAW["train_digits"] = "--output"
REFUSED += [(name, option, "/no/such/a.png", "there is no folder") for name, option in DRAW.items()]
REFUSED += [(name, option, "/tmp/a.bmpp", "must end in one of") for name, option in DRAW.items()]


def test_every_picture_is_checked_before_the_work():
    for script in (*EXAMPLES.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")):
        for line in script.read_text().splitlines():
            if "type=Path" in line and "--load" not in line:
                assert ".png" not in line, script
                assert "picture" not in line, script


#: what an example whose experiments have options of their own runs here
EXPERIMENTS = {"biased_compression": "descent", "simulations": "leader_symmetry"}


def of_refused(example, option, value):
    experiment = [EXPERIMENTS[example]] if example in EXPERIMENTS else []
    return f"mpi_examples.{example}", *experiment, option, value


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(of_refused(*call), words, id=f"refused@{'-'.join(call)}")
        for *call, words in REFUSED
    ],
)
def test_bad_options_are_refused_before_ranks_start(said, call, words):
    status, output, started_mpi = said(tuple(of_refused(*call) for *call, _ in REFUSED))[call]
    assert words in output
    assert (status, started_mpi) == (2, False)


def test_mnist_by_hand(tmp_path):
    from mpi_examples import data

    def write(name, array, packed=False):
        header = b"\0\0\x08" + bytes([array.ndim]) + np.array(array.shape, ">u4").tobytes()
        whole = header + array.tobytes()
        file = tmp_path / (name + ".gz" * packed)
        file.write_bytes(gzip.compress(whole) if packed else whole)
        return file

    images = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    for name, packed in zip(data.MNIST, (True, False, False, True), strict=True):
        array = images if "images" in name else np.arange(5, dtype=np.uint8)
        file = write(name, array, packed)
    x, x_test, y, _ = data.mnist(data.mnist_folder(str(tmp_path)))
    assert (x.shape, x.dtype, y.dtype) == ((5, 1, 28, 28), np.float32, np.int64)
    assert abs(x.mean()) < 1e-5
    assert np.array_equal(x, x_test)
    assert np.allclose(np.ptp(x), np.ptp(images) / images.std())
    short = write("short", np.zeros(3, np.uint8))
    short.write_bytes(short.read_bytes()[:-1])
    with pytest.raises(ValueError, match="2 bytes for a shape of"):
        data.idx(short)
    short.write_bytes(b"\0\0\x09\1\0\0\0\1\0")
    with pytest.raises(ValueError, match="no idx file of bytes"):
        data.idx(short)
    file.unlink()
    with pytest.raises(ArgumentTypeError, match=r"has no t10k-labels.*fetch_mnist"):
        data.mnist_folder(str(tmp_path))


def test_penn_treebank_by_hand(tmp_path):
    from mpi_examples.data import penn_treebank, ptb_folder

    for name, text in (
        ("train", " a b <unk>\n b c b\n"),
        ("valid", " c d\n"),
        ("test", " a <unk>\n"),
    ):
        (tmp_path / f"ptb.{name}.txt").write_text(text)
    found = penn_treebank(ptb_folder(str(tmp_path)))
    # b three times, <eos> twice, then in the order of the text; <unk> and new words are 0
    assert found.words == 5
    assert found.train.tolist() == [3, 1, 0, 2, 1, 4, 1, 2]
    assert found.valid.tolist() == [4, 0, 2]
    assert found.test.tolist() == [3, 0, 2]
    (tmp_path / "ptb.valid.txt").unlink()
    with pytest.raises(ArgumentTypeError, match=r"has no ptb.valid.txt: --data wants"):
        ptb_folder(str(tmp_path))


def test_the_standard_library_is_one_text_on_every_rank():
    from mpi_examples.data import WORDS, standard_library

    one, other = standard_library(), standard_library()
    assert one.words == WORDS + 1
    assert len(one.train) > 3 * len(one.test) > 0
    assert len(one.valid) > 0
    for text, again in zip(one[:3], other[:3], strict=True):
        assert np.array_equal(text, again)
        assert set(text) <= set(range(one.words))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_share_a_text(size):
    from mpi_examples.data import columns, segments

    text = np.arange(100)
    parts = [columns(text, 2, rank, size) for rank in range(size)]
    length = 100 // (2 * size)
    assert {part.shape for part in parts} == {(length, 2)}
    everything = np.concatenate([part.T.flatten().numpy() for part in parts])
    assert sorted(everything) == list(range(2 * size * length))
    read = list(segments(parts[0], 7))
    assert np.concatenate([x for x, _ in read]).tolist() == parts[0][:-1].tolist()
    assert all((following == x + 1).all() for x, following in read)


def test_a_text_that_is_too_short():
    from mpi_examples.data import columns

    with pytest.raises(SystemExit, match="100 words are too few for 64 columns: --batch-size"):
        columns(np.arange(100), 16, 0, 4)


def test_no_model_sees_the_next_word():
    import torch

    from mpi_examples.models import TEXT_MODELS

    torch.manual_seed(0)
    words = torch.randint(11, (6, 3))
    changed = words.clone()
    changed[4] = (words[4] + 1) % 11
    for make in TEXT_MODELS.values():
        model = make(11, 8, 6, 0.0).eval()
        before, after = model(words, None)[0], model(changed, None)[0]
        assert torch.allclose(before[:4], after[:4])
        assert not torch.allclose(before[4], after[4])


def test_table_of_accuracies_by_hand():
    from mpi_examples.accuracy import table

    def runs(*finals):
        return [{"final": final, "sent_last": 100, "dense": 400} for final in finals]

    lines = table("lstm", {"none": runs(10, 11, 12), "dgc": runs(12, 12, 15)}).splitlines()
    assert lines[0] == "lstm: test perplexity; dense runs are from 10.00 to 12.00"
    assert lines[3].split() == ["dgc", "13.00", "4.30", "1.73", "+2.00", "+2.0", "100", "B", "4x"]


def test_an_average_after_every_local_step_is_that_of_gradients():
    from mpi_examples.accuracy import TASKS, Wanted, train

    settings = TASKS["digits"].settings._replace(momentum=0.0, epochs=1, warmup_epochs=0)
    methods = ("none", "local_sgd:sync_every=1", "local_sgd:sync_every=11")
    dense, local, seldom = (train(Wanted("digits", settings, m, 0)) for m in methods)
    assert local["test_loss"] == pytest.approx(dense["test_loss"], rel=1e-4)
    assert local["sent"] == pytest.approx(dense["dense"], rel=1e-3)
    assert seldom["sent"] == pytest.approx(dense["dense"] / 11, rel=1e-3)
    assert seldom["test_loss"] != pytest.approx(dense["test_loss"], rel=1e-4)


@full
@pytest.mark.timeout(300)
def test_accuracy(tmp_path):
    results = tmp_path / "found.json"
    command = [*program("accuracy"), "--tasks", "digits", "lstm", "--epochs", "1", "--seeds", "2"]
    command += ["--warmup-epochs", "0", "--results", str(results)]
    command += ["--compression", "dgc:compact", "sparse_loco:sync_every=5"]
    _, output = jobs.run(command, timeout=280)
    assert len(json.loads(results.read_text())) == 12
    assert "digits: test accuracy; dense runs are from" in output
    assert "lstm: test perplexity; dense runs are from" in output
    _, again = jobs.run(command, timeout=60)
    assert output.partition("\n\n")[2] == again.partition("\n\n")[2], "kept, not trained again"


@full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_steps(tmp_path, framework):
    script, found = ROOT / "benchmarks" / "steps.py", tmp_path / "steps.json"
    command = [jobs.python(), str(script), "--ranks", "2", "--rounds", "1", "--warmup", "1"]
    command += ["--framework", framework, "--networks", "shm", "--json", str(found)]
    command += ["--model", "mobilenet_v2"]
    command += ["--methods", "Horovod fp16", "fp16", "dgc:density=0.001"]
    command += ["plain top-k", "original DGC"] if framework == "torch" else []
    _, output = jobs.run(command, timeout=180)
    rows = {row["name"]: row["sent"] for row in json.loads(found.read_text())}
    sent = {"Horovod fp16": 7010e3, "fp16": 7010e3, "dgc:density=0.001": 169.6e3}
    if framework == "torch":
        sent["plain top-k"] = 28.8e3
        assert rows.pop("backward") is rows.pop("stream") is None
    assert rows == pytest.approx(sent, rel=0.01), output
    assert ("no original DGC: name a checkout" in output) == (framework == "torch")


@full
@pytest.mark.timeout(200)
def test_hsdp():
    script = str(ROOT / "benchmarks" / "hsdp.py")
    command = [jobs.python(), script, "--width", "64", "--layers", "2", "--rounds", "1"]
    _, output = jobs.run([*command, "--methods", "none", "topk:density=0.01"], timeout=180)
    assert "2 replicas of 2 shards, 8,320 elements" in output
    rows = re.findall(
        r"^(\S.*?) +[\d.]+ ms, least +[\d.]+ ms, sent +([\d.]+) kB", output, re.MULTILINE
    )
    assert rows[:3] == [("HSDP float32", "16.6"), ("HSDP bfloat16", "8.3"), ("none", "16.6")]


def test_local_step():
    script = ROOT / "benchmarks" / "local_step.py"
    _, output = jobs.run([jobs.python(), str(script), "--rounds", "3"], timeout=60)
    assert re.search(r"25,502,912 elements, threads 1: step [\d.]+ ms, stream", output)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "dense_allreduce",
            "--bytes 4000 --small 8 --rounds 1 --small-rounds 1",
            "8 bytes, 2 ranks",
        ),
        pytest.param(
            *("sparse_allreduce", "--elements 100000 --rounds 1", "chosen on each of 2 ranks"),
            marks=full,
        ),
        pytest.param(
            *("many_ranks", "--elements 9000 12000 --rounds 1", "2 ranks, 12,000 elements"),
            marks=full,
        ),
    ],
)
def test_benchmarks_of_collectives_start_their_ranks(name, options, words):
    command = [jobs.python(), str(ROOT / "benchmarks" / f"{name}.py"), "--ranks", "2"]
    _, output = jobs.run([*command, *options.split()], timeout=180)
    assert output.startswith("$ ")
    assert words in output


def start(
    example: str, *options: str, launcher: str = "alone", ranks: int = 0, timeout: float = 100
) -> str:
    """The output of an example; ``alone`` it starts its ranks by itself."""
    command = [*jobs.launcher(ranks, launcher), *program(example)]
    _, output = jobs.run([*command, *options], timeout=timeout, **jobs.variables(launcher))
    return output


#: of six ranks, by algorithm
SUMMARIES = {
    "ring": "10 rounds, 60 messages; every rank sent 208 to 216 bytes",
    # blocks of 4 and of 2
    "halving_doubling": "5 rounds, 28 messages; every rank sent 192 to 224 bytes",
    "direct": "2 rounds, 60 messages; every rank sent 192 to 224 bytes",
}


@pytest.mark.timeout(120)
def test_allreduce_steps(tmp_path):
    picture = tmp_path / "steps.png"
    options = ["--ranks", "6", "--output", str(picture), "--algorithms", *SUMMARIES]
    output = start("allreduce_steps", *options)
    assert output.startswith("$ ")
    found = [line for line in output.splitlines() if line.endswith("have the right sum")]
    for line, summary in zip(found, SUMMARIES.values(), strict=True):
        assert line.startswith(f"{summary}, for a vector of 128")
    assert re.search(r"^1 +0 +1 +\d+ +\S+ +0 +ring reduce-scatter$", output, re.MULTILINE)
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", ["mpich", pytest.param("mpirun", marks=full)])
def test_allreduce_steps_under_a_starter(tmp_path, launcher):
    if launcher == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    output = start(
        "allreduce_steps", "--output", str(tmp_path / "steps.png"), launcher=launcher, ranks=3
    )
    assert "$ " not in output
    assert "4 rounds, 12 messages" in output


@full
@pytest.mark.timeout(120)
def test_an_example_starts_itself_under_mpich(tmp_path):
    if problem := jobs.mpich_missing():
        pytest.skip(problem)
    command = [*program("allreduce_steps"), "--ranks", "3"]
    command += ["--output", str(tmp_path / "steps.png")]
    _, output = jobs.run(command, timeout=100, **jobs.variables("mpich"))
    assert output.startswith(f"$ {jobs.MPICH}")
    assert "4 rounds, 12 messages" in output


@pytest.mark.timeout(120)
def test_slurm_script(tmp_path):
    """All of it but srun, and training with NumPy."""
    picture = tmp_path / "digits.png"
    command = ["bash", str(EXAMPLES / "clusters" / "slurm.sh"), "--framework", "numpy"]
    command += ["--epochs", "3", "--warmup-epochs", "1", "--output", str(picture)]
    launcher = " ".join(jobs.launcher(2, "mpirun"))
    _, output = jobs.run(command, timeout=100, START=launcher, SLURM_SUBMIT_DIR=str(ROOT))
    assert "numpy, 2 ranks, 3 epochs; all ranks have the same weights, bit for bit" in output
    untagged = [line.rpartition(">:")[2] for line in output.splitlines()]  # by mpirun
    lines = [line.split() for line in untagged if line.endswith(" ms")]
    rows = {name: columns for name, *columns in lines}
    assert rows.keys() == {"none", "dgc"}
    for row in rows.values():
        assert float(row[0]) > 90, output
    assert rows["none"][4] == "1.0x"
    assert float(rows["dgc"][7].rstrip("x")) > 250
    assert picture.read_bytes().startswith(PNG)


def test_page_of_all_systems():
    from mpi_examples.all_systems import SYSTEMS

    page = (ROOT / "docs" / "systems.md").read_text()
    cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`([\w+]+)`", cell)]
    assert sorted(named) == sorted(SYSTEMS)


def test_leader_symmetry(tmp_path):
    picture = tmp_path / "symmetry.png"
    command = [*program("simulations"), "leader_symmetry", "--output", str(picture)]
    _, output = jobs.run(command, timeout=60)
    # sqrt(1 - 1.5 / 4) on both sides of the hill, whose top is the centre
    assert "EASGD: workers 0.7906 and -0.7906, tested 0.0000, f 1.0000" in output
    assert "Leader SGD: workers -1.0000 and -1.0000, tested -1.0000, f 0.0000" in output
    assert picture.read_bytes().startswith(PNG)


@full
@pytest.mark.timeout(200)
def test_errors_against_batch_sizes(tmp_path):
    picture = tmp_path / "batches.png"
    options = ["--ranks", "2", "--epochs", "1", "--warmup-epochs", "1", "--seeds", "1"]
    options += ["--small", "256", "--large", "512", "--picture", str(picture)]
    output = start("train_large_batch", *options, timeout=180)
    assert re.search(r"^ +256 +512 +1024$", output, re.MULTILINE)
    assert re.search(r"^lamb( +[\d.]+){3}$", output, re.MULTILINE)
    assert picture.read_bytes().startswith(PNG)


def test_canonical_ordering_by_hand():
    """The gap falls with the width alone, as it is believed to."""
    from mpi_examples.generalization import Study, tables

    runs = [
        {"setting": ["sgd", width], "gap": 1 / width, "epochs": 1, "measures": {"width": -width}}
        for width in (16, 32, 64)
    ]
    study = Study(["optimizer", "width"], 100, 3, runs)
    canonical = study.canonical()
    assert np.isnan(canonical[0])
    assert canonical[1] == 1
    assert study.scored()["width"].tau == 1
    assert "3 of 3 networks were fit" in tables(study)
    with pytest.raises(SystemExit, match="1 of 3 networks were fit: too few"):
        Study(["optimizer", "width"], 100, 3, runs[:1])
