"""Steps that schedules of several operators share: tiles, fetches, register tiles, tensor-core intrinsics."""
