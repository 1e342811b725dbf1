"""Hopper forward in Gluon: `schedule` orders tasks, `forward` is the kernel, `tiles` its table, `split` for few tiles, `launch` it."""
