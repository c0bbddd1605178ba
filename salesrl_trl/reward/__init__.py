"""From a completion's text to its reward. Refuses to know the policy, its tokens and the schedule."""
