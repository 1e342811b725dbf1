"""Hopper forward in Gluon: `schedule` orders the tiles, `forward` is the kernel, `tiles` its table, `launch` the host side."""
