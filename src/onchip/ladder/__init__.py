"""The ladder: every step from naive attention to the hardware's limit, predicted, executed and measured."""
