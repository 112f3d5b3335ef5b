"""Other engines that serve drafts: what each requires of the files, how it is called, and what it counts."""
