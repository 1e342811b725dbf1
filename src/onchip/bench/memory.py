"""Peak extra memory of a call: the most bytes alive at once beyond those alive before it, its result included."""
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def peak_extra_bytes(fn: Callable[[], T], device: str | torch.device = "cpu") -> tuple[int, T]:
    """Call ``fn()`` once; return its peak extra bytes and its result.

    CUDA: the caching allocator's own peak, so blocks are rounded up to 512 bytes and scratch inside operators counts. Elsewhere: the exact
    bytes of every storage that a torch operator called by `fn` returns, until it is freed; what one operator allocates and frees inside
    itself (packed matmul operands, for instance) is not seen.
    """
    if torch.device(device).type == "cuda":
        return _cuda_peak(fn, device)
    with LiveBytes() as count:
        result = fn()
    return count.peak, result


def _cuda_peak(fn: Callable[[], T], device: str | torch.device) -> tuple[int, T]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, result


class LiveBytes(TorchDispatchMode):
    """While active, follows every storage torch operators make: `live` bytes now, `peak` bytes at most."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        # address of a storage → its weak reference, and the bytes counted for it: None for one that was there before
        self._known: dict[int, tuple[weakref.ref, int | None]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to skip torch._dynamo torch first imports it: 2.8 s

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._known:
                self._record(storage, None)
        out = func(*args, **kwargs)
        for storage in _storages(out):
            there = self._known.get(storage._cdata)
            if there is None or there[1] is not None:  # made here: new, or perhaps resized
                self._record(storage, storage.nbytes())
        return out

    def _record(self, storage: torch.UntypedStorage, nbytes: int | None) -> None:
        address = storage._cdata
        self._forget(address)
        self._known[address] = weakref.ref(storage, lambda _: self._forget(address)), nbytes
        self.live += nbytes or 0
        self.peak = max(self.peak, self.live)

    def _forget(self, address: int) -> None:
        _, nbytes = self._known.pop(address, (None, None))
        self.live -= nbytes or 0


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided]
