#!/bin/bash
# Train on two nodes with four ranks each, from the root of the checkout:
#
#     qsub mpi_examples/clusters/pbs.sh
#     qsub -v ARGS="--framework numpy --epochs 30" mpi_examples/clusters/pbs.sh
#
#PBS -N digits
#PBS -l select=2:ncpus=32:mpiprocs=4:ompthreads=8
#PBS -l place=scatter
#PBS -l walltime=00:15:00
#PBS -j oe

set -euo pipefail

# PBS starts a job in the home directory.
cd "${PBS_O_WORKDIR:-.}"
# If MPI is a module of the cluster:  module load openmpi
if [[ -f .venv/bin/activate ]]; then
    source .venv/bin/activate
fi

# PBS sets it to ompthreads of the first chunk.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A rank that is lost shall not hold the nodes until the time is up.
export HVD_COMPRESS_TIMEOUT=${HVD_COMPRESS_TIMEOUT:-300}
export PYTHONUNBUFFERED=1

# The file of nodes names each node once for each of its mpiprocs, which Open MPI counts as slots.  An
# Open MPI that was built with PBS (`ompi_info | grep tm`) asks it instead, and needs no ssh:
# qsub -v START="mpirun --map-by slot:PE=8 --bind-to core" ...
start=${START:-mpirun --hostfile $PBS_NODEFILE --map-by slot:PE=$OMP_NUM_THREADS --bind-to core
    -x PATH -x OMP_NUM_THREADS -x HVD_COMPRESS_TIMEOUT -x PYTHONUNBUFFERED}

if [[ -n ${PBS_NODEFILE:-} ]]; then
    ranks=$(wc -l < "$PBS_NODEFILE") nodes=$(sort -u "$PBS_NODEFILE" | wc -l)
fi
echo "${nodes:-1} nodes, ${ranks:-?} ranks, $OMP_NUM_THREADS cores each: $start"
$start python -m mpi_examples.train_digits_mpi ${ARGS:-} "$@"
