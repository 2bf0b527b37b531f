"""Systems that are built on the core: each says what is sent, and what is done with what came."""
