"""Verification of a store's data at rest: every rule that the running store keeps, read again."""
