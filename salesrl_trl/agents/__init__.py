"""Multi-turn conversations: tools, episodes, and the endpoint through which agents call the policy."""
