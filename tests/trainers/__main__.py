"""The program that torchrun starts: see the package."""

import importlib
import os
import sys
import warnings

import torch
import torch.distributed as dist

from tests.scenarios import of_program, run_all


def main() -> None:
    folder, name = sys.argv[1:]
    warnings.simplefilter("ignore")  # they are the packages' own, and many
    torch.set_num_threads(1)
    module = importlib.import_module(f"tests.trainers.{name}_scenarios")
    dist.init_process_group("gloo")
    os.chdir(folder)  # where some write files without being asked
    run_all(folder, dist.get_rank(), of_program(vars(module)), dist.barrier)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
