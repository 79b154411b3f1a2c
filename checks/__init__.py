"""What is run by hand, not by the tests."""
