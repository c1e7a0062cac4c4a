"""`nvfp4r bench`: layers measured on this GPU, and plans that are faster than the rule's.

Runs only when somebody measures; what it finds is kept by plan/tuned.py.
"""
