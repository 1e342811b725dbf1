"""Exact attention: one operator, every feature, every device.

`api` is what people call, `contract` what it means, `dispatch` what runs it, `ops` its place in torch, `reference` the meaning executed.
"""
from onchip.attention.api import attention, attention_varlen, explain
from onchip.attention.merge import merge_attention
from onchip.attention.sdpa import scaled_dot_product_attention

__all__ = ["attention", "attention_varlen", "explain", "merge_attention", "scaled_dot_product_attention"]
