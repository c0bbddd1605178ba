"""Tools, episodes and the endpoint by which agents ask the policy: conversations of several turns."""
