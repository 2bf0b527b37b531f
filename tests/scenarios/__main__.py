"""See the package's docstring."""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

from scenarios import scenarios
from scenarios.driver import barrier, hvd, over

folder, *modules = sys.argv[1:]
warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".*__array__ implementation", DeprecationWarning)  # in Keras
hvd.init()
with (Path(folder) / str(hvd.rank())).open("a") as log:
    for module in modules:
        for name, function in scenarios(module, over=over).items():
            problem = None
            try:
                function()
                barrier()
            except Exception:
                problem = traceback.format_exc()
            print(json.dumps([f"{module}.{name}", problem]), file=log, flush=True)
            if problem:
                print(problem, file=sys.stderr, flush=True)
                os._exit(1)  # the others wait for collectives that will not come
