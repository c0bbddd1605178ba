"""Keeping each branch's divergence from the reference policy inside its own band."""
