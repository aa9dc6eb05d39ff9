"""Only what pyproject.toml can't say: the native engine is built by cffi in API mode."""

from setuptools import setup

setup(cffi_modules=["zinf_fx/native/build.py:builder"])
