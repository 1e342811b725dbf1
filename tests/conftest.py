"""What every test relies on: interpreted kernels where there is no GPU, and one thread a worker."""
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads this when a kernel is defined: set before any import of one

torch.set_num_threads(1)  # tests run side by side: a second thread would wait for a core at every small product
