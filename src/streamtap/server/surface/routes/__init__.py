"""What the service answers, one file an address."""
