"""Names of blocks: hashes of tokens, keys, scopes, the namespace and the fingerprint of the weights."""
