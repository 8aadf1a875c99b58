"""Text of answers: normalisers, EM, F1, cover-EM, and signs of hostile passages.

Imports no other room. Begin with `normalize.py`.
"""
