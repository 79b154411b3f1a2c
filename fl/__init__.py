"""What stands behind common.py."""
