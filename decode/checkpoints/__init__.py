"""Draft checkpoints on disk, in the formats of serving engines and of other projects."""
