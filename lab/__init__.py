"""Experiments that can be re-run anywhere; not part of the wheel."""
