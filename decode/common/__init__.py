"""What every package needs and no model: command lines, output folders, files, errors, chats, progress."""
