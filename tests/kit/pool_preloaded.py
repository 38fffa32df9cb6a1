"""What a pool of processes imports beforehand in tests."""
