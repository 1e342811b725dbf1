"""Truth in float64 for the operators, and what counts as agreement with it: for the suite, for ``onchip verify``, for your own backend.

`onchip.testing.attention` and `onchip.testing.softmax` are written from the definitions and share no code with what they judge.
"""
