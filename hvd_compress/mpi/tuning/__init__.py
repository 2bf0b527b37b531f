"""What collectives cost, measured and predicted."""
