"""Studies, which explain rather than train: theory, simulations and measures; no other package
imports it.

============================  ======================================================================
``decentralized``             steady states on quadratic functions
``estimators``                gradients of a finite sum with less noise: LSVRG
``measures``                  measures of generalisation, and how well they order networks
``step_sizes``                what the constants of an operator allow
``stragglers``                what waiting for slow workers costs
============================  ======================================================================
"""
