"""What `scripts/soak.py` is made of: the scene, its faults, the episodes, and what must be true after each run."""
