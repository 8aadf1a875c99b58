"""Text of answers: normalisers, EM, F1, cover-EM; sentences; signs of hostile text.

Imports no other room. Begin with `normalize.py`.
"""
