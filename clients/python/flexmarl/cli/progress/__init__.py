"""What a run looks like while it goes on, and what stays of it."""
