"""The conversation suite: what clients see, the same on fake and on real engines."""
