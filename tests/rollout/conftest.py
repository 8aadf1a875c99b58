"""Tiny programs are compiled once and run once: optimising them is the most of it."""

from tests.rollout.tiny import quick_compilation

__all__ = ["quick_compilation"]
