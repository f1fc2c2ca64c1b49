"""A library: the presets built for one target as a Python package that needs nothing of this one.

`collect` builds the kernels in parallel, `write` puts them into a folder that can be put on ``sys.path``, installed, or
made a wheel; `package` is the code that the folder carries to find and load them.
"""
