"""Functions run in processes of their own, where Triton compiles: its interpreter, which the tests run under, is set for a whole process.

Importing the library with torch and Triton takes a process 3 to 5 s of CPU time, a Hopper kernel 8 to compile. So one process a worker
imports them, once, without the interpreter, and every call is a fork of it: fresh, whatever calls before it patched.
"""
import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, ParamSpec, TypeVar
from unittest.mock import patch

import pytest

P, R = ParamSpec("P"), TypeVar("R")


@cache
def _context() -> ForkServerContext:
    forkserver.set_forkserver_preload(["pytest", "onchip.cli.app", "onchip.attention.hopper.offline", "onchip.bench.kernels"])
    with patch.dict(os.environ):
        os.environ.pop("TRITON_INTERPRET", None)
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def call(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`function(*args, **kwargs)` there: a function of a module, with arguments and a result that can be pickled.

    The test fails with the traceback when the function raises, and with the status when its process dies.
    """
    here, there = _context().Pipe(duplex=False)
    process = _context().Process(target=_answer, args=(there, function, args, kwargs), daemon=True)
    process.start()
    there.close()
    try:
        result, error = here.recv()
    except EOFError:
        process.join()
        pytest.fail(f"the process of {function.__qualname__} died with status {process.exitcode}", pytrace=False)
    finally:  # a test that ran out of time leaves no process behind
        process.kill()
        process.join()
        here.close()
    if error:
        pytest.fail(error, pytrace=False)
    return result


def _answer(there: Connection, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        there.send((function(*args, **kwargs), ""))
    except Exception:
        there.send((None, traceback.format_exc()))
