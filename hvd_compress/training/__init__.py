"""Ways to train with fewer or cheaper exchanges, and with large batches."""
