"""Shims for other libraries, one file for each, with the versions that it holds for.

A shim knows its library and nothing of zinf_fx. The library need not be there: classes are told by their names.
"""
