"""Packed text: files of rows, and windows of them."""
