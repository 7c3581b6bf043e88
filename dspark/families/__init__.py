"""Checkpoint packagings: one small module for each, which recognises it and resolves it to a `DrafterConfig`."""
