"""Softmax and its family: `api` is what people call, `contract` what it means, `reference` the meaning executed, `triton` the speed."""
from onchip.softmax.api import log_softmax, logsumexp, softmax, softmax_topk

__all__ = ["log_softmax", "logsumexp", "softmax", "softmax_topk"]
