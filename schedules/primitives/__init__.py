"""Steps that schedules share."""
