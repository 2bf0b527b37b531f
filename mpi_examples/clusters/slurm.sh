#!/bin/bash
# Train on two nodes with four ranks each, from the root of the checkout:
#
#     sbatch mpi_examples/clusters/slurm.sh
#     sbatch --nodes=4 mpi_examples/clusters/slurm.sh --framework numpy --epochs 30
#
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=00:15:00
#SBATCH --output=%x-%j.log

set -euo pipefail

# Slurm runs a copy of this file from a folder of its own.
cd "${SLURM_SUBMIT_DIR:-.}"
# If MPI is a module of the cluster:  module load openmpi
if [[ -f .venv/bin/activate ]]; then
    source .venv/bin/activate
fi

# NumPy's and PyTorch's threads are to stay on the cores of their rank.
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# A rank that is lost shall not hold the nodes until the time is up.
export HVD_COMPRESS_TIMEOUT=${HVD_COMPRESS_TIMEOUT:-300}
export PYTHONUNBUFFERED=1

# --mpi is pmix for Open MPI and pmi2 for MPICH; `srun --mpi=list` shows what this Slurm has.
# Since Slurm 22.05, srun does not take --cpus-per-task over from sbatch.
# START="mpirun --map-by slot:PE=8 --bind-to core" sbatch ... does without srun.
start=${START:-srun --mpi=pmix --cpus-per-task=$OMP_NUM_THREADS --cpu-bind=cores --kill-on-bad-exit}

echo "${SLURM_JOB_NUM_NODES:-1} nodes, ${SLURM_NTASKS:-?} ranks, $OMP_NUM_THREADS cores each: $start"
$start python -m mpi_examples.train_digits_mpi "$@"
