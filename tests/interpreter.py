"""Triton's interpreter without what it does over and over: the same numbers in less than half the time."""
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Take three costs out of every call that a kernel makes.

    * The language is turned into numpy once a launch, and back after it: Triton 3.7 goes through its modules again, in 0.5 ms, at every
      call of a device function.
    * Sums and products of integers are not made a second time in 64 bits, for a check whose verdict nothing reads: an assertion in a kernel
      counts in debug mode only, and there the check stays.
    * numpy's name of a type is looked up, in a table that is not made anew.

    `tests/test_interpreter.py` holds what stays true; the suite runs without these too, on a Triton whose interpreter is made otherwise.
    """
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")):
        return
    patch, untouched = interpreter._patch_lang, tl.load
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})  # a kernel sees tl, Triton's own device functions tl.core

    def patch_once(function: Any) -> Any:
        return patch(everything) if tl.load is untouched else interpreter._LangPatchScope()  # which has nothing to restore

    options = interpreter.interpreter_builder.options
    scalar, pointer = cache(interpreter._get_np_dtype), interpreter._get_np_dtype(tl.pointer_type(tl.int8))
    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    interpreter._get_np_dtype = lambda kind: pointer if kind.scalar.is_ptr() else scalar(kind.scalar)
