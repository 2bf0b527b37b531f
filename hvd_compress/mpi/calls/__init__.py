"""Calls of users: checks, choices among the algorithms, and results in the arrays of the user."""
