"""The package's own files in a checkpoint, beside those of transformers.

Owns the run's identity (`identity`) and the generation batch under way (`under_way`). Refuses to decide when a
checkpoint is written: transformers does.
"""
