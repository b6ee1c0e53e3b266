"""The rollout role: lease, generate, reward, upload."""
