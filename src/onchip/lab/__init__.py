"""The lab: claims about the machine as experiments, each with a prediction, a measurement and a verdict. CUDA C++, compiled at run time."""
