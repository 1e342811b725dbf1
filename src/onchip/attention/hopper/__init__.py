"""Hopper forward in Gluon: `schedule` orders tasks, `tiles` is the table, `launch` starts it; `split` for few tiles.

`forward` is the kernel: its consumers compute by `arithmetic` and write by `output`, its `producer` copies.
"""
