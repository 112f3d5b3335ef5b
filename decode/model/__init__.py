"""A language model of transformers that runs in fixed shapes: ragged rows, token trees and roll-back."""
