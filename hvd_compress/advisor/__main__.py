"""``OMP_NUM_THREADS=1 python -m hvd_compress.advisor`` measures the kept pieces again, in some
minutes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

from tqdm import tqdm

from hvd_compress.advisor.advice import CANDIDATES
from hvd_compress.advisor.pieces import FILE, measured, to_json
from hvd_compress.advisor.shapes import MODELS


def main() -> None:
    methods = [candidate.method for candidate in CANDIDATES]
    parser = argparse.ArgumentParser(description="Measure what methods cost on one core.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    options = parser.parse_args()
    rows = json.loads(FILE.read_text()) if FILE.exists() else {}
    rows = {name: rows.get(name, {}) for name in MODELS}
    for model, method in tqdm([(m, x) for m in options.models for x in options.methods], ncols=90):
        # Each in a process of its own: large arrays leave memory in pieces that others cannot use.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows[model][method] = to_json(pool.submit(measured, method, MODELS[model]()).result())
        models = []  # a line for each method, whose changes can be read
        for name, of_methods in rows.items():
            lines = (f"  {json.dumps(m)}: {json.dumps(row)}" for m, row in of_methods.items())
            models.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
        FILE.write_text("{\n" + ",\n".join(models) + "\n}\n")


if __name__ == "__main__":
    main()
