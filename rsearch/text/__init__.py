"""Text of answers: normalisers, EM, F1, cover-EM; sentences, and signs of hostility.

Imports no other room. Begin with `normalize.py`.
"""
