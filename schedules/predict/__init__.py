"""Which config is fastest, as far as that can be told without running any: what the choice is made by.

`estimate` says what a device has to do for a config, `features` that and the config as numbers, `trees` what recorded
trials of many layers taught beyond it, `rank` puts the configs of all schedules of an operator in order.
"""
