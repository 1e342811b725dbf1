"""What every test relies on: interpreted kernels where there is no GPU, and one thread a worker."""
import os
from importlib.util import find_spec

# Tests run side by side: a second thread would wait for a core at every small product, and spin while it waits. Read when torch and numpy
# are imported, here and in the programs that tests start: `onchip verify --quick` takes 6 s of CPU time instead of 23 on two busy cores.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when a kernel is defined: set before any import of one
    if find_spec("triton"):
        from tests.interpreter import hasten

        hasten()

torch.set_num_threads(1)
