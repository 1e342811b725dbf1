"""The package itself: light to import, its names lazy, its functions never hidden by the rooms of the same name."""
import subprocess
import sys

import pytest

import onchip


def python(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", *options, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_fast_and_needs_nothing():
    seconds = python("import sys, time; t = time.perf_counter(); import onchip; s = time.perf_counter() - t; "
                     "assert not {'torch', 'numpy', 'triton'} & set(sys.modules); print(s)")
    assert float(seconds) < 0.5


@pytest.mark.parametrize("name", [n for n in onchip.__all__ if n != "__version__"])
def test_every_public_name_is_a_documented_function(name):
    function = getattr(onchip, name)
    assert callable(function)
    assert function.__doc__
    assert name in dir(onchip)


def test_functions_are_not_hidden_by_their_rooms():
    """Whatever is imported first: each order in a fork of one process, that has torch and Triton and nothing of onchip."""
    python("""
import os, sys, torch, triton
assert 'onchip' not in sys.modules
for first in ('', 'import onchip.attention.api', 'from onchip.softmax import api', 'from onchip.attention import ops'):
    if not os.fork():
        exec(first)
        import onchip
        assert onchip.attention.__name__ == 'attention' and onchip.softmax.__name__ == 'softmax'
        from onchip.attention.contract import Spec
        assert callable(onchip.attention)
        os._exit(0)
    assert os.wait()[1] == 0, first
""", "-W", "ignore:This process:DeprecationWarning")  # Python 3.12 on forks where torch has threads


def test_unknown_names_and_missing_torch_say_so():
    with pytest.raises(AttributeError, match=r"'flash'.*attention"):
        _ = onchip.flash
    out = python("import sys; sys.modules['torch'] = None; import onchip\n"
                 "try: onchip.attention\nexcept ImportError as e: print(e)")
    assert out.strip() == "onchip.attention needs torch, which is not installed: pip install 'onchip[torch]'"
