"""The divergence of each branch from the reference policy, inside the branch's own band.

- `penalty`: the KL of a token, and the penalty inside TRL's loss.
- `law`: what moves a coefficient.
- `branched`: the windows, the coefficients, and all of this in one object.
"""
