"""Recognisers, one file per structure: a value in, a match or a reason out; IR is not changed."""
