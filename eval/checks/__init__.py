"""Checks of the output itself: is it lossless, and are the answers right?"""
