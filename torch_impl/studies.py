"""Studies in PyTorch, which explain rather than train: ``measures`` of generalisation.  No other
module imports it."""

import sys

from . import measures

#: so that it can be imported by this name, as ``os.path`` can
sys.modules[f"{__name__}.measures"] = measures
