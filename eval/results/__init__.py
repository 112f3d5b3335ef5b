"""What is measured, as types with their JSON, in which a text says what may be published of it."""
