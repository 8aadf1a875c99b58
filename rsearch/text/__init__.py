"""Text of answers: normalisers, EM, F1, cover-EM, and signs of hostile passages.

Imports nothing of rsearch but `types`. Begin with `normalize.py`.
"""
