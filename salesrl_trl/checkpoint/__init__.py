"""What a checkpoint holds beside transformers' own files.

Owns what a run is made of (`identity`) and the generation batch under way (`under_way`). Refuses to decide when a
checkpoint is written: transformers does.
"""
