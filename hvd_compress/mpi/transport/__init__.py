"""Messages between ranks, and waiting for them."""
