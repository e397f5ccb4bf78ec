"""Keys and values on a rank: attention in parts, buffers, the cache, packed rows, shared prefixes, transfers."""
