"""Checks before anything is started or written: bad input ends here, with one clear line."""
