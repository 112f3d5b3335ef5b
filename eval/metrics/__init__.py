"""Numbers from decode records and model files; nothing here decodes."""
