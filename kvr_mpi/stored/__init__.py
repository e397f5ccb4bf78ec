"""Keys and values that an earlier job stored, found again, asked, and weighed against prefilling once more."""
