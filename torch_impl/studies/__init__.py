"""Studies in PyTorch, which explain rather than train: ``measures`` of generalisation.  No other
package imports it."""
