"""Running engines of others: started, asked and ended."""
