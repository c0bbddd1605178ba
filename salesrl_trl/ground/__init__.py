"""What serves every other room, with the standard library alone: the process and its end, patches of objects, keys of
services, the fences around hostile text.

Refuses to know anything of this package's own.
"""
