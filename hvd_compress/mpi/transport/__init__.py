"""Messages between ranks, and what waits for them."""
