"""The states of tensors: where they are kept, and how they are saved and loaded."""
