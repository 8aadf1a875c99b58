"""Tests compile tiny programs and run them once, so optimising them is not worth it."""

from tests.rollout.tiny import quick_compilation

__all__ = ["quick_compilation"]
