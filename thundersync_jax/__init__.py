"""ThunderSync: exact, streamed reinforcement learning of language models."""
