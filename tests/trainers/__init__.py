"""Scenarios of other people's training loops, with our compression in them.

``torchrun --nproc-per-node 2 -m tests.trainers FOLDER NAME`` runs those of ``NAME_scenarios.py`` on
every rank, with the real package.
"""
