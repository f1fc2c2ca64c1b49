"""What every room speaks: problems, operators and schedules as data, arches, arithmetic, tolerances, errors.

Nothing here imports another room, and importing it imports neither TVM nor PyTorch.
"""
