"""See the package's docstring."""

import os
import sys
import warnings

from hvd_compress import NeedsTuning, PoorFit
from tests.scenarios import run_all, scenarios
from tests.scenarios.driver import barrier, hvd

folder, *modules = sys.argv[1:]
over = os.environ.get("SCENARIOS_OVER", "horovod")
warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".*__array__ implementation", DeprecationWarning)  # in Keras
warnings.filterwarnings("ignore", category=DeprecationWarning, module="gast")  # in AutoGraph
# PyTorch 2.11 says so of tensors that opt out, too.
warnings.filterwarnings("ignore", "Sparse invariant checks")
warnings.filterwarnings("ignore", category=PoorFit)  # a few steps teach nothing
warnings.filterwarnings("ignore", category=NeedsTuning)
hvd.init()
functions = {
    name: function
    for module in modules
    for name, function in scenarios(module, over=over, ranks=hvd.size()).items()
}
run_all(folder, hvd.rank(), functions, barrier)
