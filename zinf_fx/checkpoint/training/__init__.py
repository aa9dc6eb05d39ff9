"""Checkpoints: a training on disk, to be taken up by any number of ranks, in any placement.

A checkpoint is a directory with a manifest, in JSON, and data files. The manifest says which elements of which tensor
each piece in a data file is, with its checksum; it has all plain values itself. What the manifest doesn't name is not
part of the checkpoint. See `manifest` for the form, and [Note: commits] in `files` for why a crash leaves no mixture.
"""
