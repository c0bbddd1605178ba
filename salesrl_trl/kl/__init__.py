"""The divergence of each branch from the reference policy, inside the branch's own band."""
