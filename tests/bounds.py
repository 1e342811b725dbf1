"""Where interpreted kernels read and write: inside the tensors of their launch, to the byte, as compute-sanitizer's memcheck has it."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter


def _spans(argument: Any) -> list[tuple[int, int]]:
    """Addresses [first, last) of the tensors in a kernel's argument."""
    if isinstance(argument, tuple):
        return [span for item in argument for span in _spans(item)]
    t = getattr(argument, "base", argument)  # of a descriptor
    if not isinstance(t, torch.Tensor) or not t.numel():
        return []
    first = t.data_ptr()
    return [(first, first + (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))) * t.element_size())]


@contextmanager
def bounded() -> Iterator[list[int]]:
    """Fails the first access that is outside. What it yields counts the addresses looked at."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    spans: list[tuple[int, int]] = []
    counted = [0]

    def take(self: Any, args: Any, named: Any) -> Any:
        given, others = arguments(self, args, named)
        spans[:] = sorted(_spans((*given, *others.values())))
        return given, others

    def look(pointers: Any, mask: Any, size: int) -> None:
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
        counted[0] += at.size
        inside = np.zeros(at.shape, bool)
        for first, last in spans:
            inside |= (at >= first) & (at + size <= last)
        if not inside.all():
            near = min(spans, key=lambda span: abs(int(at[~inside][0]) - span[1]))
            pytest.fail(f"{size} bytes at {int(at[~inside][0]) - near[1]:+d} from the end of a tensor of {near[1] - near[0]} bytes")

    def size_of(pointers: Any) -> int:
        return max(pointers.get_element_ty().primitive_bitwidth // 8, 1)

    def masked_load(self: Any, pointers: Any, mask: Any, *more: Any, **named: Any) -> Any:
        look(pointers, mask, size_of(pointers))
        return load(self, pointers, mask, *more, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *more: Any, **named: Any) -> Any:
        look(pointers, mask, size_of(pointers))
        return store(self, pointers, value, mask, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "_init_args_hst", take)
        patch.setattr(builder, "create_masked_load", masked_load)
        patch.setattr(builder, "create_masked_store", masked_store)
        yield counted
    assert counted[0], "no interpreted kernel ran"
