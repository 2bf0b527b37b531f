"""Tests of the parameter server."""

#: steps of a worker, and seconds after which the jobs take a silent worker for lost
STEPS, TIMEOUT = 6, 1.5
