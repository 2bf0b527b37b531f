"""``compression="auto"``: the method is chosen in the first steps, by the advisor's model."""

from hvd_compress.auto.method import Auto

__all__ = ["Auto"]
