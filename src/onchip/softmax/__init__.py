"""Softmax and log-softmax: `api` is what people call, `contract` what it means, `reference` the meaning executed, `triton` the speed."""
from onchip.softmax.api import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
