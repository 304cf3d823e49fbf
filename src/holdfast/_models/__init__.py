"""Published models: their names, import, export, fetch, and proofs that weights are the same."""
