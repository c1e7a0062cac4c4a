"""`nvfp4r bench`: layers measured on this GPU, and plans found faster than the rule's, on disk.

The kernels' calls read the plans kept (tuned.py); all else runs only when somebody measures.
"""
