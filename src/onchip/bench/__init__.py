"""Measuring: time, memory, and the machine's own ceilings to hold them against."""
