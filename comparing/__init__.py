"""What compare.py needs."""
