"""What a person looks at: a kernel explained step by step, reports of searches, the state of the machine."""
